"""Records each rank's last call of `torch.distributed` in shared memory, to explain hangs.

Each public operation of `torch.distributed` is wrapped once per rank process. Before and after
every call the wrapper writes one short line into a page that the parent maps too, so the note
survives whatever becomes of the rank: blocked in C, stopped, killed. Working at this boundary
needs nothing from the backend.
"""

from __future__ import annotations

import functools
import inspect
import mmap
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from conformance.checks.compare import describe
from conformance.harness.call_needs import needs_of_call
from conformance.harness.missing_methods import explain_missing_method
from conformance.harness.outcome import NOTHING_REFUSED, Refusal, message_of, type_name
from conformance.torch_private import registered_name

PAGE_BYTES = 4096
_HEADER = struct.Struct("<?H")

RECORDED = (
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_gather_single",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "broadcast_object_list",
    "destroy_process_group",
    "gather",
    "gather_object",
    "init_process_group",
    "irecv",
    "isend",
    "monitored_barrier",
    "new_group",
    "recv",
    "recv_object_list",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "scatter",
    "scatter_object_list",
    "send",
    "send_object_list",
    "split_group",
)


@dataclass(frozen=True, slots=True)
class LastCollective:
    """The newest operation of a rank. text is "" if there was none."""

    text: str
    in_it: bool


class Page:
    """One page shared by a rank, which writes, and its parent, which reads."""

    def __init__(self, fd: int) -> None:
        self._memory = mmap.mmap(fd, PAGE_BYTES)

    def write(self, text: str, *, in_it: bool) -> None:
        """Note an operation; an overlong text is cut."""
        data = text.encode()[: PAGE_BYTES - _HEADER.size]
        self._memory[: _HEADER.size + len(data)] = _HEADER.pack(in_it, len(data)) + data

    def returned(self) -> None:
        """Note that the operation written last has come back."""
        self._memory[0] = 0

    def read(self) -> LastCollective:
        """What was noted last."""
        in_it, length = _HEADER.unpack_from(self._memory)
        data = self._memory[_HEADER.size : _HEADER.size + length]
        return LastCollective(data.decode(errors="replace"), in_it)

    def close(self) -> None:
        self._memory.close()


_ORIGINALS: dict[Callable[..., Any], Callable[..., Any]] = {}


def unrecorded(operation: Callable[..., Any]) -> Callable[..., Any]:
    """The operation itself, for whoever measures it: noting a call takes some ten microseconds."""
    return _ORIGINALS.get(operation, operation)


class Recorder:
    """Wraps the operations of `torch.distributed` in this process, for good."""

    def __init__(self, page: Page) -> None:
        self._page = page
        self._counts: Counter[tuple[str, str]] = Counter()
        # .outer: the call that this thread is in; .needs: what that call asks for
        self._calls = threading.local()
        self._asked: set[str] = set()
        self._refused = NOTHING_REFUSED
        for name in RECORDED:
            operation = getattr(distributed_c10d, name, None)
            if operation is not None:  # torch 2.11 lacks the newest names
                wrapped = self._wrap(name, operation)
                for module in (dist, distributed_c10d):
                    if getattr(module, name, None) is operation:
                        setattr(module, name, wrapped)

    def reset(self) -> None:
        """Begin a new world: counters start again and nothing has been issued."""
        self._counts.clear()
        self._page.write("", in_it=False)

    def expect_calls(self) -> None:
        """A function of a case begins: it has made no call."""
        self._asked.clear()
        self._refused = NOTHING_REFUSED

    def note(self, refusal: Refusal) -> None:
        """What the device refused, or what raised in another way; the first one counts."""
        self._refused = self._refused or refusal

    def refused(self, *, function_raised: bool) -> Refusal:
        """The first call that raised since `expect_calls`. If none did, and the function itself
        has raised, what all of its calls asked for: one may have raised when it was waited for.
        """
        if self._refused or not function_raised:
            return self._refused
        return Refusal(needs=tuple(sorted(self._asked)))

    def _wrap(self, name: str, operation: Callable[..., Any]) -> Callable[..., Any]:
        names = tuple(inspect.signature(operation).parameters)
        group_at = names.index("group") if "group" in names else len(names)

        @functools.wraps(operation)
        def recorded(*args: Any, **kwargs: Any) -> Any:
            group = args[group_at] if len(args) > group_at else kwargs.get("group")
            outer: str = getattr(self._calls, "outer", "")
            outer_needs: tuple[str, ...] = getattr(self._calls, "needs", ())
            # What an operation does to do its work is the target's own affair.
            needs = outer_needs or needs_of_call(name, args, kwargs)
            self._calls.needs = needs
            self._asked.update(needs)
            self._calls.outer = self._describe(name, group, args, kwargs)
            self._page.write(self._calls.outer, in_it=True)
            try:
                return operation(*args, **kwargs)
            except Exception as error:
                self.note(Refusal(f"{name} raised {_brief(error)}", needs))
                raise
            finally:
                self._calls.outer, self._calls.needs = outer, outer_needs
                if outer:  # which goes on
                    self._page.write(outer, in_it=True)
                else:
                    self._page.returned()

        _ORIGINALS[recorded] = operation
        return recorded

    def _describe(self, name: str, group: Any, args: Any, kwargs: Any) -> str:
        group_name = _group_name(group)
        self._counts[name, group_name] += 1
        number = self._counts[name, group_name]
        tensors = ", ".join(_tensors((*args, *kwargs.values())))
        return f"{name} #{number} on group {group_name!r}{', ' + tensors if tensors else ''}"


def _brief(error: Exception) -> str:
    message = message_of(error)
    first = f"{type_name(type(error))}: {message}".splitlines()[0]
    hint = explain_missing_method(error, message)
    return f"{first} ({hint})" if hint else first


def _group_name(group: Any) -> str:
    if group is None:
        return "default"
    try:
        return str(group.group_name)
    except (AttributeError, RuntimeError):  # no member's group, or a Python group without a name
        return registered_name(group)


def _tensors(values: Any) -> Iterator[str]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield describe(value)
        elif isinstance(value, list | tuple) and value and isinstance(value[0], torch.Tensor):
            yield f"[{len(value)} x {next(_tensors(value))}]"

"""Hooks before and after each call of a group, and at its failure, which torch 2.15 has in C++.

torch fires the first two where its dispatcher hands a call to the group. A group in Python is
called directly, so `dispatched` fires these; see `ProcessGroupGloo.register_pre_hook`.
"""

from __future__ import annotations

import enum
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d

_log = logging.getLogger(__name__)


class _Call(NamedTuple):
    """How a method is called: its name among torch's, and which of its arguments are what."""

    name: str
    inputs: int | None = None
    outputs: int | None = None
    has_root: bool = False  # or a peer


# By the names that the methods have in torch 2.15.
_CALLS = {
    "broadcast": _Call("BROADCAST", inputs=0, has_root=True),
    "allreduce": _Call("ALLREDUCE", inputs=0),
    "allreduce_coalesced": _Call("ALLREDUCE_COALESCED", inputs=0),
    "reduce": _Call("REDUCE", inputs=0, has_root=True),
    "allgather": _Call("ALLGATHER", inputs=1, outputs=0),
    "allgather_coalesced": _Call("ALLGATHER_COALESCED", inputs=1, outputs=0),
    "all_gather_single": _Call("ALLGATHER_BASE", inputs=1, outputs=0),
    "all_gather_single_coalesced": _Call("ALLGATHER_INTO_TENSOR_COALESCED", inputs=1, outputs=0),
    "reduce_scatter": _Call("REDUCE_SCATTER", inputs=1, outputs=0),
    "reduce_scatter_single": _Call("REDUCE_SCATTER_BASE", inputs=1, outputs=0),
    "reduce_scatter_single_coalesced": _Call(
        "REDUCE_SCATTER_TENSOR_COALESCED", inputs=1, outputs=0
    ),
    "alltoall": _Call("ALLTOALL", inputs=1, outputs=0),
    "all_to_all_single": _Call("ALLTOALL_BASE", inputs=1, outputs=0),
    "gather": _Call("GATHER", inputs=1, outputs=0, has_root=True),
    "scatter": _Call("SCATTER", inputs=1, outputs=0, has_root=True),
    "barrier": _Call("BARRIER"),
    "send": _Call("SEND", inputs=0, has_root=True),
    "recv": _Call("RECV", outputs=0, has_root=True),
    "recv_anysource": _Call("RECV", outputs=0),
}


def _names(torchs: Any) -> Any:
    """torch's own, if it has them all: 2.14 has no names for forms of one tensor."""
    ours = sorted({call.name for call in _CALLS.values()})
    if all(hasattr(torchs, name) for name in ours):
        return torchs
    return enum.Enum("HookOpName", ours)


HookOpName: Any = _names(getattr(c10d, "HookOpName", None))


@dataclass(frozen=True, slots=True)
class PreHookArgs:
    """A call that is about to be issued, as torch's class of this name shows it.

    root: the root, or the peer of a message, as a rank of the group; -1 if there is none. op_id:
    the same for the hooks after the call. Lists of lists of tensors are flat.
    """

    name: Any
    async_op: bool
    input_tensors: list[Tensor]
    output_tensors: list[Tensor]
    root: int
    op_id: int


@dataclass(frozen=True, slots=True)
class PostHookArgs:
    """A call that was issued, and its handle."""

    name: Any
    async_op: bool
    work: dist.Work
    op_id: int


class CallHooks:
    """The hooks of one group, each under a number; they are called in the order of numbers."""

    def __init__(self) -> None:
        self.is_empty = True
        self._before: dict[int, Callable[[PreHookArgs], object]] = {}
        self._after: dict[int, Callable[[PostHookArgs], object]] = {}
        self._ids = itertools.count()

    def put_before(self, hook_id: int, hook: Callable[[PreHookArgs], object] | None) -> None:
        """In the place of the one that has this number, if there is one; None takes it away."""
        self._put(self._before, hook_id, hook)

    def put_after(self, hook_id: int, hook: Callable[[PostHookArgs], object] | None) -> None:
        """As `put_before`."""
        self._put(self._after, hook_id, hook)

    def _put(self, hooks: dict[int, Any], hook_id: int, hook: Any) -> None:
        if hook is None:
            hooks.pop(hook_id, None)
        else:
            hooks[hook_id] = hook
        self.is_empty = not (self._before or self._after)

    def around(
        self,
        issue: Callable[[], dist.Work],
        method: str,
        tensors: Sequence[Any],
        others: Sequence[Any],
        keywords: Mapping[str, Any],
    ) -> dist.Work:
        """What `issue` returns, with the hooks called before and after it.

        An exception of a hook is the caller's; if the hook was one before, nothing is issued.

        tensors, others, keywords: the arguments of the method.
        """
        call = _CALLS[method]
        name, op_id = getattr(HookOpName, call.name), next(self._ids)
        options = [x for x in (*others, keywords.get("opts")) if hasattr(x, "asyncOp")]
        asynchronous = all(x.asyncOp for x in options)
        inputs, outputs = (
            [] if place is None else list(flat(tensors[place : place + 1]))
            for place in (call.inputs, call.outputs)
        )
        root = _root(options, others, keywords) if call.has_root else -1
        before = PreHookArgs(name, asynchronous, inputs, outputs, root, op_id)
        for _, hook in sorted(self._before.items()):
            hook(before)
        work = issue()
        for _, late in sorted(self._after.items()):
            late(PostHookArgs(name, asynchronous, work, op_id))
        return work


class AbortHooks:
    """Called when a collective of one group fails, before its caller knows; each has a number."""

    def __init__(self) -> None:
        self._hooks: dict[int, Callable[[], object]] = {}

    def put(self, hook_id: int, hook: Callable[[], object] | None) -> None:
        """In the place of the one that has this number, if there is one; None takes it away."""
        if hook is None:
            self._hooks.pop(hook_id, None)
        else:
            self._hooks[hook_id] = hook

    def call(self) -> None:
        """In the order of their numbers, on the thread that found the failure."""
        for hook_id, hook in sorted(self._hooks.items()):
            try:
                hook()
            except Exception:  # the caller must get to know of the failure, not of this
                _log.exception("abort hook %d raised", hook_id)


def _root(options: Sequence[Any], others: Sequence[Any], keywords: Mapping[str, Any]) -> int:
    """In the options, named, or the first argument that is no tensor: a peer, or the root in
    torch's short form."""
    named = [keywords[name] for name in ("root", "dstRank", "srcRank") if name in keywords]
    found: int = next(iter([*(x.rootRank for x in options), *named, *others]), 0)
    return found


def flat(arguments: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors in arguments that are tensors, lists of them, or lists of lists."""
    for argument in arguments:
        if isinstance(argument, Tensor):
            yield argument
        elif isinstance(argument, list | tuple):
            yield from flat(argument)

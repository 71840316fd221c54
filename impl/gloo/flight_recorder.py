"""The flight recorder: the newest operations of this process, kept for a look after a hang.

    TORCH_FR_BUFFER_SIZE=2000 python train.py
    impl.gloo.flight_recorder.dump()    # bytes; torch.distributed.flight_recorder analyses them

A group that is made while TORCH_FR_BUFFER_SIZE (or TORCH_NCCL_TRACE_BUFFER_SIZE, its older name) is
positive records its collectives and messages in a ring of that many entries, which all groups of
the process share. Without it nothing is recorded, as with 0 in torch, which by default keeps 2000.

The form is that of torch 2.13's recorders. Names begin with "gloo:", since torch's analysis knows
its own backends alone. A call is "scheduled" until its turn comes, "started" until it has
succeeded, then "completed" and retired. One that fails stays as it was: it has not ended on all
ranks. `monitored_barrier`, which names missing ranks itself, is not recorded.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from types import CodeType, FrameType
from typing import Any, ParamSpec

import torch
from torch import Tensor

from impl.gloo.requests.titles import title_of

_VARIABLES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")  # the first that is set
_VERSION = "2.10"  # of the form
_OWN_MODULES = ("impl.gloo.", "impl.torch_dispatch")
_FRAMES_MAX = 64
_LISTED_OUTPUTS = {"all_gather", "gather"}  # one tensor for each rank
_LISTED_INPUTS = {"reduce_scatter", "scatter"}

P = ParamSpec("P")


class GroupFlight:
    """What is known of one group: its entries refer to it, and it counts them."""

    def __init__(self, recorder: _Recorder, number: int, name: str, ranks: Iterable[int]) -> None:
        self._recorder = recorder
        self.number = number
        self.name = name
        self.desc = "undefined"
        self.ranks = list(ranks)
        self.collectives = self.messages = 0  # recorded so far
        self.last_started = self.last_completed = -1

    def recorded(
        self,
        operation: str,
        inputs: Sequence[Any],
        outputs: Sequence[Any],
        timeout_s: float,
        run: Callable[P, None],
    ) -> Callable[P, None]:
        """Record a collective; `run`, when it is called, tells of its start and its success.

        inputs, outputs: tensors, or lists of them.
        """
        inputs = _joined(operation, inputs, _LISTED_INPUTS)
        outputs = _joined(operation, outputs, _LISTED_OUTPUTS)
        entry = _Entry(self, title_of(operation), inputs, outputs, timeout_s)
        self._recorder.append(entry, is_message=False)

        def run_and_tell(*args: P.args, **named: P.kwargs) -> None:
            entry.start()
            self.last_started = entry.collective
            run(*args, **named)
            entry.succeed()
            self.last_completed = entry.collective

        return run_and_tell

    def message(
        self, operation: str, rank: int, peer: int, tensor: Tensor, timeout_s: float
    ) -> Callable[[int], None]:
        """Record a message; what is returned takes the rank that sent, and tells of success.

        peer: -1 if any rank may send.
        """
        sized = [(tuple(tensor.shape), tensor.dtype)]
        is_sent = operation == "send"
        title = f"send {rank}->{peer}" if is_sent else f"recv {rank}<-{peer}"
        entry = _Entry(self, title, *((sized, []) if is_sent else ([], sized)), timeout_s)
        self._recorder.append(entry, is_message=True)
        entry.start()

        def succeed(source: int) -> None:
            if not is_sent:
                entry.title = f"recv {rank}<-{source}"
            entry.succeed()

        return succeed

    def status(self) -> dict[str, int]:
        return {
            "last_enqueued_collective": self.collectives or -1,
            "last_started_collective": self.last_started,
            "last_completed_collective": self.last_completed,
        }


Sized = tuple[tuple[int, ...], torch.dtype]  # a tensor's shape and dtype


class _Entry:
    """One call."""

    record_id = operation_id = collective = message = 0  # see `_Recorder.append`
    is_message = False
    state = "scheduled"
    started_ns: int | None = None
    completed_ns: int | None = None

    def __init__(
        self,
        group: GroupFlight,
        title: str,
        inputs: list[Sized],
        outputs: list[Sized],
        timeout_s: float,
    ) -> None:
        self.group = group
        self.title = title
        self.inputs = inputs
        self.outputs = outputs
        self.timeout_ms = round(timeout_s * 1000)
        self.created_ns = time.time_ns()
        self.thread = threading.get_ident(), threading.current_thread().name
        self.stack = _stack_of_caller()

    def start(self) -> None:
        self.started_ns = time.time_ns()
        self.state = "started"

    def succeed(self) -> None:
        self.completed_ns = time.time_ns()
        self.state = "completed"

    def described(self, with_frames: bool) -> dict[str, Any]:
        """In torch's form."""
        frames = [
            {"name": code.co_name, "filename": code.co_filename, "line": line}
            for code, line in self.stack
        ]
        return {
            **({"frames": frames} if with_frames else {}),
            "record_id": self.record_id,
            "pg_id": self.group.number,
            "process_group": (self.group.name, self.group.desc),
            "collective_seq_id": self.collective,
            "p2p_seq_id": self.message,
            "op_id": self.operation_id,
            "profiling_name": f"gloo:{self.title}",
            "time_created_ns": self.created_ns,
            "input_sizes": [list(shape) for shape, _ in self.inputs],
            "input_dtypes": [_name_of(dtype) for _, dtype in self.inputs],
            "output_sizes": [list(shape) for shape, _ in self.outputs],
            "output_dtypes": [_name_of(dtype) for _, dtype in self.outputs],
            "state": self.state,
            "time_discovered_started_ns": self.started_ns,
            "time_discovered_completed_ns": self.completed_ns,
            "retired": self.state == "completed",
            "timeout_ms": self.timeout_ms,
            "is_p2p": self.is_message,
            "thread_id": str(self.thread[0]),
            "thread_name": self.thread[1],
        }


class _Recorder:
    """The ring of this process, and its groups."""

    def __init__(self) -> None:
        self._ring: deque[_Entry] = deque(maxlen=1)  # later as the newest group asked for
        self.forget()

    def forget(self) -> None:
        """In a forked child: what is recorded, and a lock that is held, is the parent's."""
        self._lock = threading.RLock()  # a signal's handler may dump at any moment
        self._ring = deque(maxlen=self._ring.maxlen)
        self._groups: weakref.WeakSet[GroupFlight] = weakref.WeakSet()
        self._group_count = self._entry_count = 0

    def new_group(self, name: str, ranks: Iterable[int], entry_count_max: int) -> GroupFlight:
        with self._lock:
            if self._ring.maxlen != entry_count_max:
                self._ring = deque(self._ring, entry_count_max)
            group = GroupFlight(self, self._group_count, name, ranks)
            self._group_count += 1
            self._groups.add(group)
        return group

    def append(self, entry: _Entry, is_message: bool) -> None:
        """Give the call its place in the process and in its group."""
        group = entry.group
        with self._lock:
            entry.record_id = self._entry_count
            self._entry_count += 1
            group.messages += is_message
            group.collectives += not is_message
            entry.is_message = is_message
            entry.collective, entry.message = group.collectives, group.messages
            entry.operation_id = group.collectives + group.messages
            self._ring.append(entry)

    def contents(self) -> tuple[list[_Entry], list[GroupFlight]]:
        """What is recorded, and the groups that exist or have entries, the oldest first."""
        with self._lock:
            entries = list(self._ring)
            groups = {*self._groups, *(entry.group for entry in entries)}
        return entries, sorted(groups, key=lambda group: group.number)


_recorder = _Recorder()
os.register_at_fork(after_in_child=_recorder.forget)


def of_group(name: str, ranks: Iterable[int]) -> GroupFlight | None:
    """For a new group: what records its calls; None if the environment asks for nothing.

    ranks: the members, as ranks of the default group.
    Raises ValueError if the variable is no whole number.
    """
    variable = next((name for name in _VARIABLES if name in os.environ), None)
    if variable is None:
        return None
    try:
        entry_count_max = int(os.environ[variable])
    except ValueError:
        raise ValueError(f"{variable} is {os.environ[variable]!r}; it must be a number") from None
    return _recorder.new_group(name, ranks, entry_count_max) if entry_count_max > 0 else None


def dump(
    include_collectives: bool = True, include_stack_traces: bool = True, only_active: bool = False
) -> bytes:
    """What is recorded, pickled. Any thread may ask, at any moment.

    only_active: without calls that have succeeded.
    """
    return pickle.dumps(_described(include_collectives, include_stack_traces, only_active))


def dump_json(include_collectives: bool = True, only_active: bool = False) -> bytes:
    """The same as JSON, without stack traces."""
    return json.dumps(_described(include_collectives, False, only_active)).encode()


def _described(with_entries: bool, with_frames: bool, only_active: bool) -> dict[str, Any]:
    entries, groups = _recorder.contents()
    described: dict[str, Any] = {
        "version": _VERSION,
        "comm_lib_version": "",
        "pg_config": {
            group.name: {"name": group.name, "desc": group.desc, "ranks": str(group.ranks)}
            for group in groups
        },
        "pg_status": {str(group.number): group.status() for group in groups},
    }
    if with_entries:
        told = [entry.described(with_frames) for entry in entries]
        described["entries"] = [e for e in told if not (only_active and e["retired"])]
    return described


def _joined(operation: str, given: Sequence[Any], listed: set[str]) -> list[Sized]:
    """Shapes and dtypes. Of equal tensors, one for each rank, that of one that holds them all."""
    if operation == "allgather_coalesced" and given and not isinstance(given[0], Tensor):
        given = list(zip(*given, strict=True))  # lists of ranks become lists for each input
    if operation in listed and given and isinstance(given[0], Tensor):
        given = [given]
    return [sized for one in given for sized in _sized(one)]


def _sized(given: Tensor | Sequence[Tensor]) -> list[Sized]:
    if isinstance(given, Tensor):
        return [(tuple(given.shape), given.dtype)]
    each = [(tuple(tensor.shape), tensor.dtype) for tensor in given]
    return [((len(each), *each[0][0]), each[0][1])] if len(set(each)) == 1 else each


def _stack_of_caller() -> list[tuple[CodeType, int]]:
    """Code and line of each frame outside of this package, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_OWN_MODULES):
        frame = frame.f_back
    stack: list[tuple[CodeType, int]] = []
    while frame is not None and len(stack) < _FRAMES_MAX:
        stack.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return stack


def _name_of(dtype: torch.dtype) -> str:
    """torch's name for it in C++: "Float", "Long", "ComplexFloat"."""
    kind: Any = torch.empty(0, dtype=dtype, device="cpu").type()
    return str(kind).removeprefix("torch.").removesuffix("Tensor")

"""Base class of the process group: issues operations, with sequence number, deadline and `Work`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, cast

import torch.distributed as dist
from torch import Tensor

from impl import errors
from impl.gloo import flight_recorder
from impl.gloo.connect.membership import Unconfigured
from impl.gloo.connect.transports import GroupPlace, connect
from impl.gloo.memory.staging import Lender
from impl.gloo.options import Options
from impl.gloo.queue.executor import Executor
from impl.gloo.queue.profiling import profiled
from impl.gloo.queue.work import CollectiveWork
from impl.gloo.requests.call_hooks import AbortHooks, CallHooks
from impl.gloo.requests.settings import CallSettings
from impl.torch_private import profiler_is_on, waits_by_tensor
from impl.transport.base import CallInfo, Communicator, Deadline
from impl.transport.lent import MemoryGone, aborted

# What a call does when its turn has come. It holds no group: one without other references
# must end, whatever is queued.
Operation = Callable[[Communicator, CallInfo, Deadline], None]


class Described(NamedTuple):
    """A call in words: see `CallInfo.signature` and `CallInfo.shown`."""

    signature: str
    shown: str


def joined(described: Iterable[Described]) -> Described:
    """Of several tensors in one call."""
    signatures, shown = zip(*described, strict=True)
    return Described(" ; ".join(signatures), " ; ".join(shown))


# torch's stubs give most methods two overloads that name their arguments differently, which no
# single method can override; as Any, the base class does not hold its subclasses to them
_ProcessGroup: Any = dist.ProcessGroup


class GroupCore(_ProcessGroup):  # type: ignore[misc]  # subclassing Any: see above
    """A connected group that can issue operations; subclasses say which."""

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        options: Options,
        group: str,
        *,
        is_connected: bool = True,
    ) -> None:
        """is_connected: if not, its first `_enter` comes later."""
        # only the form without a store makes an object whose methods C++ code finds
        _ProcessGroup.__init__(self, rank, size)
        self._options = options
        self._timeout_s = options.timeout.total_seconds()
        self._name = group
        self.call_hooks = CallHooks()
        self._abort_hooks = AbortHooks()
        place = GroupPlace(store, rank, size, group)
        if is_connected:
            self._enter(place, self._connect(place, options))
        else:
            self._enter(place, Unconfigured(f"group {group!r}, rank {rank} of {size}"))

    def _enter(self, place: GroupPlace, connected: Communicator | Unconfigured) -> None:
        """Begin as this rank of a group that is connected so."""
        self._rank = place.rank
        self._size = place.world_size
        self._sequence = 0
        self._surplus = 0  # see `CallInfo.surplus`
        ranks = self._options.global_ranks_in_group or range(place.world_size)
        self._flight = flight_recorder.of_group(self._name, ranks)  # None if nothing is recorded
        self._executor = Executor(self._name)
        self._comm: Communicator = cast(Communicator, connected)

    def _connect(self, place: GroupPlace, options: Options) -> Communicator:
        return connect(place, options)

    def _issue(
        self,
        operation: str,
        described: Described,
        run: Operation,
        outputs: list[Any],
        asked: CallSettings,
        *,
        lender: Lender | None = None,
        inputs: Sequence[Tensor] | None = None,
        tags: int = 1,
    ) -> CollectiveWork:
        """Take the next place in the group's order, and run there.

        outputs: what the work's future holds. inputs: for a profiler, if they are not the outputs.
        tags: how many it takes of Gloo's wire.
        A synchronous operation has ended on return, and its error is raised here. Its time runs
        from when its turn has come.
        """
        sequence = self._sequence
        self._sequence = sequence + 1
        call = CallInfo(operation, sequence, described.signature, described.shown, self._surplus)
        self._surplus += tags - 1
        span_s = self._timeout_s if asked.timeout_s is None else asked.timeout_s
        if self._flight is not None:
            read = outputs if inputs is None else inputs
            run = self._flight.recorded(operation, read, outputs, span_s, run)
        if not asked.asynchronous and not profiler_is_on() and self._executor.enter():
            try:
                _perform(run, self._comm, call, span_s, lender, self._name, self._abort_hooks)
            finally:
                self._executor.leave()
            work = CollectiveWork.finished(call, self._name, outputs)
            if lender is not None and lender.has_streams:
                work.set_lender(lender)
                lender.synchronize()
            return work
        work = self._enqueue(call, span_s, run, outputs, lender, inputs)
        if not asked.asynchronous:
            work.wait()
        elif waits_by_tensor():
            work.register()
        return work

    def _enqueue(
        self,
        call: CallInfo,
        span_s: float,
        run: Operation,
        outputs: list[Any],
        lender: Lender | None,
        inputs: Sequence[Tensor] | None,
    ) -> CollectiveWork:
        comm, name, hooks = self._comm, self._name, self._abort_hooks
        work = CollectiveWork(call, self._name, outputs)
        work.set_helper(self._executor.help_with)
        if lender is not None and lender.has_streams:
            work.set_lender(lender)

        work.set_profiled_range(profiled(call.operation, outputs if inputs is None else inputs))
        self._executor.submit(work, lambda: _perform(run, comm, call, span_s, lender, name, hooks))
        return work


def _perform(
    run: Operation,
    comm: Communicator,
    call: CallInfo,
    span_s: float,
    lender: Lender | None,
    group: str,
    abort_hooks: AbortHooks,
) -> None:
    until = Deadline.after(span_s)
    try:
        if lender is None:
            run(comm, call, until)
        else:
            lender.run(lambda: run(comm, call, until))
    except MemoryGone as gone:
        error = aborted(gone, call, group, comm.rank, comm.world_size)
        abort_hooks.call()
        comm.abort(f"{call.operation}: {gone}")  # the other ranks may still need this one
        raise error from None
    except errors.CommunicationError:
        abort_hooks.call()
        raise


def as_list(tensors: Tensor | Sequence[Tensor]) -> list[Tensor]:
    """One tensor or several."""
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def as_lists(tensors: Sequence[Tensor] | Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
    """One list of tensors or several."""
    if tensors and isinstance(tensors[0], Tensor):
        return [[tensor for tensor in tensors if isinstance(tensor, Tensor)]]
    return [list(inner) for inner in tensors]

"""Mutants of conformance/spec/collectives/pairs.py."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from conformance.power.handles import Done, Relayed
from tests.mutants.collectives.kit import AroundTorch, all_of, mapped
from tests.mutants.collectives.order import Late
from tests.mutants.kit import ForwardingGroup, breaks


class StaysInACopy(ForwardingGroup):
    """The result of `second` right behind `first` stays in a copy."""

    first: ClassVar[str]
    second: ClassVar[str]
    last = ""

    def forward(self, method: str, *args: Any, **kwargs: Any) -> Any:
        if (self.last, method) == (self.first, self.second):
            args = (mapped(Tensor.clone, args[0]), *args[1:])
        self.last = method
        return super().forward(method, *args, **kwargs)


@breaks("order/pairs", says=r"the result of broadcast: rank \d is wrong")
class BroadcastsIntoACopyBehindAGather(StaysInACopy):
    first, second = "gather", "broadcast"


@breaks("order/pairs", says=r"all_gather, then send \(.*the result of send")
class ReceivesIntoACopyBehindAnAllGather(StaysInACopy):
    first, second = "allgather", "recv"

    def send(self, *args: Any) -> Any:
        """A message is sent before another one is received."""
        return self.inner.send(*args)


@breaks("order/pairs", says=r"the result of all_reduce: rank \d is wrong")
class ReducesACopyBehindAMessage(StaysInACopy):
    first, second = "recv", "allreduce"


@breaks("order/pairs", says=r"broadcast, then coalesced \(.*the result of coalesced")
class CoalescesCopiesBehindABroadcast(StaysInACopy):
    first, second = "broadcast", "allreduce_coalesced"


class _Filling(Relayed):
    """The outputs are filled when it is waited for, unless it was `ended` before."""

    def __init__(self, inner: Any, group: Any, fill: Callable[[], None]) -> None:
        super().__init__(inner)
        self.group = group
        self.fill = fill
        self.ended = False
        group.pending.append(self)

    def wait(self, timeout: timedelta | None = None) -> bool:
        if not self.ended:
            self.group.end(self)
        return True

    def end(self) -> None:
        self.inner.wait()
        self.fill()
        self.ended = True


class Fills(AroundTorch):
    """Outputs are filled by a wait. `end` says by that for which handle."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.pending: list[_Filling] = []

    def end(self, handle: _Filling) -> None:
        raise NotImplementedError

    def around(self, right: Callable[..., Any], taken: Any, *rest: Any) -> Any:
        copies = mapped(Tensor.clone, taken)

        def fill() -> None:
            for x, y in zip(all_of(taken), all_of(copies), strict=True):
                x.copy_(y)

        return _Filling(right(copies, *rest), self, fill)


@breaks("order/pairs", says=r"in reverse order\): the result of|blocks\): the result of")
class AWaitEndsAllThatIsPending(Fills):
    """A wait for one operation ends all that are pending, and the other results are lost."""

    def end(self, handle: _Filling) -> None:
        for each in self.pending:
            each.ended = True
        handle.end()
        self.pending = []


@breaks("order/pairs", says=r"in reverse order\): the result of|blocks\): the result of")
class WaitsForTheOldest(Fills):
    """A wait ends the operation that was issued first, whichever it was called for."""

    def end(self, handle: _Filling) -> None:
        self.pending.pop(0).end()


class IssuedByWait(ForwardingGroup):
    """With async_op, `method` begins when it is waited for: a barrier may be passed before."""

    method: ClassVar[str]
    pending: Any = None

    def forward(self, method: str, *args: Any, **kwargs: Any) -> Any:
        right = partial(super().forward, method, *args, **kwargs)
        if method != self.method or not args[-1].asyncOp:
            return right()
        return _NotYet(right)


class _NotYet(Late):
    def is_completed(self) -> bool:
        return self.inner is not None and super().is_completed()


@breaks("barrier/after-pending", says=r"all_gather behind a barrier: .*rank \d is wrong")
class GathersBeginWhenWaitedFor(IssuedByWait):
    method = "allgather"


@breaks("barrier/after-pending", says=r"scatter behind a barrier: .*rank \d is wrong")
class ScattersBeginWhenWaitedFor(IssuedByWait):
    method = "scatter"


class ReadsLate(ForwardingGroup):
    """A rank that only gives leaves `method` at once; a thread reads its tensors soon after."""

    method: ClassVar[str]
    thread: threading.Thread | None = None

    def only_gives(self, root: int) -> bool:
        return self.rank() != root

    def forward(self, method: str, *args: Any, **kwargs: Any) -> Any:
        if self.thread is not None:
            self.thread.join()
        right = partial(super().forward, method, *args, **kwargs)
        if method != self.method or not self.only_gives(args[-1].rootRank):
            return right()

        def soon() -> None:
            time.sleep(0.02)
            right().wait()

        self.thread = threading.Thread(target=soon)
        self.thread.start()
        return Done()


@breaks("order/overwritten-at-once", says=r"op='broadcast'[\s\S]*got 99")
class BroadcastsWhatIsThereLater(ReadsLate):
    method = "broadcast"

    def only_gives(self, root: int) -> bool:
        return self.rank() == root


@breaks("order/overwritten-at-once", says=r"op='gather'[\s\S]*got 99")
class GathersWhatIsThereLater(ReadsLate):
    method = "gather"


@breaks("order/overwritten-at-once", says=r"op='reduce'[\s\S]*rank \d is wrong")
class ReducesWhatIsThereLater(ReadsLate):
    method = "reduce"


class ReadsWhatWasThere(ForwardingGroup):
    """`second` right behind `first` reads what its input held before `first` wrote it."""

    first: ClassVar[str]
    second: ClassVar[str]
    last = ""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.before: dict[int, Tensor] = {}

    def forward(self, method: str, *args: Any, **kwargs: Any) -> Any:
        taken, *rest = args
        if (self.last, method) == (self.first, self.second):
            rest[0] = mapped(self.as_it_was, rest[0])
        self.last = method
        self.before = {}
        for x in all_of(taken):
            memory = torch.tensor([], dtype=x.dtype).set_(x.untyped_storage())
            self.before[memory.data_ptr()] = memory.clone()
        return super().forward(method, taken, *rest, **kwargs)

    def as_it_was(self, x: Tensor) -> Tensor:
        before = self.before.get(x.untyped_storage().data_ptr())
        if before is None:
            return x
        return before.as_strided(x.shape, x.stride(), x.storage_offset())


@breaks("order/chained", says=r"broadcast, then all_gather of its result, \w+: rank \d is wrong")
class GathersWhatWasThereBeforeABroadcast(ReadsWhatWasThere):
    first, second = "broadcast", "allgather"


@breaks("order/chained", says=r"all_to_all, then scatter of its result, \w+: rank \d is wrong")
class ScattersWhatWasThereBeforeAnExchange(ReadsWhatWasThere):
    first, second = "alltoall", "scatter"


@breaks("order/chained", says=r"scatter, then all_to_all of its result, \w+: rank \d is wrong")
class ExchangesWhatWasThereBeforeAScatter(ReadsWhatWasThere):
    first, second = "scatter", "alltoall"


@breaks("barrier/behind-a-collective", says=r"before rank \d had come, behind .*all_reduce")
class LeavesOutABarrierBehindACollective(ForwardingGroup):
    """Right behind a blocking all_reduce, in which all ranks met, a barrier returns at once."""

    have_met = False

    def forward(self, method: str, *args: Any, **kwargs: Any) -> Any:
        had_met, self.have_met = self.have_met, False
        if method == "barrier" and had_met:
            return Done()
        work = super().forward(method, *args, **kwargs)
        self.have_met = method == "allreduce" and not args[-1].asyncOp
        return work


class _Copying(Relayed):
    """Copies what another operation has left."""

    def __init__(self, inner: Any, copied: Any, outputs: list[Tensor]) -> None:
        super().__init__(inner)
        self.copied = copied
        self.outputs = outputs

    def wait(self, timeout: timedelta | None = None) -> bool:
        done = super().wait(timeout)
        work, left = self.copied
        work.wait()
        for output, x in zip(self.outputs, left, strict=True):
            output.copy_(x)
        return done


@breaks("order/one-input-of-two", says=r"the second result: rank \d is wrong")
class GathersATensorOnce(ForwardingGroup):
    """What a second all_gather of a tensor gets is what the first one, still pending, got."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.pending: dict[int, Any] = {}

    def allgather(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        address = inputs[0][0].data_ptr() if isinstance(inputs[0], list) else inputs[0].data_ptr()
        earlier = self.pending.get(address)
        work = super().allgather(outputs, inputs, opts)
        if earlier is None or not opts.asyncOp:
            self.pending[address] = (work, outputs[0])
            return work
        return _Copying(work, earlier, outputs[0])

"""Mutants of conformance/spec/faults/peer_loss.py."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, ClassVar

from conformance.power.handles import Done, Relayed
from impl.gloo import ProcessGroupGloo
from tests.mutants.faults.kit import ChangesReductions, Forgiving
from tests.mutants.kit import ForwardingGroup, GroupMutant, breaks


@breaks("peer_loss/of-a-pair", says=r"rank 0  returned")
class CompletesWithoutALostPeer(ForwardingGroup):
    """Operations that fail because a rank has died count as done."""

    def forward(self, method: str, *args: Any, **kwargs: Any) -> Any:
        try:
            work = super().forward(method, *args, **kwargs)
        except RuntimeError:
            return Done()
        return Forgiving(work) if hasattr(work, "wait") else work


@breaks("peer_loss/every-rank", says=r"\[.*'all_reduce'.*\] went on after the loss")
class RankZeroDoesNotNoticeALoss(GroupMutant, ProcessGroupGloo):
    """Rank 0 does not notice the death of another rank in a reduction."""

    base = "impl"

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        try:
            work = super().allreduce(tensors, opts)
            if self.rank() == 0:
                work.wait()
        except RuntimeError:
            if self.rank() == 0:
                return Done()
            raise
        return work


@breaks("peer_loss/however-it-died", says=r"rank 0  returned")
class ReducesWithoutADeadRank(ChangesReductions):
    """A reduction with a dead rank completes without it."""

    handle = Forgiving


@breaks("peer_loss/point-to-point", says=r"rank 0  returned")
class ReceiveFromADeadRankSucceeds(ForwardingGroup):
    """A receive from a dead rank returns without data and without an error."""

    def recv(self, tensors: Any, src: int, tag: int) -> Any:
        return Forgiving(super().recv(tensors, src, tag))


class _FromSomebody(Forgiving):
    def _source_rank(self) -> int:
        return 1


@breaks("peer_loss/from-anybody", says=r"rank 0  returned")
class AnySourceReceiveSucceedsWithoutPeers(GroupMutant, ProcessGroupGloo):
    """A receive without a source succeeds when no other rank is alive."""

    base = "impl"

    def recv_anysource(self, tensors: Any, tag: int) -> Any:
        return _FromSomebody(super().recv_anysource(tensors, tag))


class _TellsOnce(Relayed):
    told = False

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self.told:
            return True
        self.told = True
        return super().wait(timeout)


@breaks("peer_loss/handle-knows", says="DID NOT RAISE")
class SecondWaitOnAFailureReturns(ChangesReductions):
    """The second wait for what has failed returns."""

    handle = _TellsOnce


class _Successful(Relayed):
    def is_success(self) -> bool:
        return True


@breaks("peer_loss/handle-knows", says=r"is_completed, is_success, has exception: rank 0 is wrong")
class FailedHandlesReportSuccess(ChangesReductions):
    """A handle whose operation failed says that it was successful."""

    handle = _Successful


@breaks("peer_loss/stays-broken", says=r"after the loss \[.*'all_reduce'.*\] went through")
class ReducesAloneAfterAFailure(ForwardingGroup):
    """After the first failure, reductions are of this rank alone."""

    has_failed = False

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        if self.has_failed:
            return Done()
        try:
            work = super().allreduce(tensors, opts)
            work.wait()
        except RuntimeError:
            self.has_failed = True
            raise
        return work


@breaks("peer_loss/other-groups-live", says=r"raised RuntimeError: a rank was lost before")
class OneLossEndsAllGroups(ForwardingGroup):
    """When one group has lost a rank, all groups of the process are over."""

    is_over: ClassVar[bool] = False

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        if self.is_over:
            raise RuntimeError("a rank was lost before")
        try:
            work = super().allreduce(tensors, opts)
            work.wait()
        except RuntimeError:
            type(self).is_over = True
            raise
        return work


@breaks("peer_loss/survivors-go-on", says=r"raised RuntimeError: this process has lost a rank")
class MakesNoGroupsAfterALoss(OneLossEndsAllGroups):
    """A process that has lost a rank can make no groups any more."""

    def __init__(self, *args: Any) -> None:
        if self.is_over:
            raise RuntimeError("this process has lost a rank")
        super().__init__(*args)


@breaks("peer_loss/all-survivors-go-on", says=r"raised RuntimeError: 4 ranks, and not 3")
class MakesNoSmallerGroupAfterALoss(GroupMutant, ProcessGroupGloo):
    """A process whose group had lost a rank makes none with fewer."""

    base = "impl"
    members: ClassVar[int | None] = None

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        cls = type(self)
        cls.members = cls.members or size
        if size < cls.members:
            raise RuntimeError(f"{cls.members} ranks, and not {size}")
        super().__init__(store, rank, size, timeout)


@breaks("peer_loss/destroy", says=r"rank 0 still holds .*shared memory")
class KeepsBrokenGroups(GroupMutant, ProcessGroupGloo):
    """A group that has lost a rank is kept after it is destroyed."""

    base = "impl"
    broken: ClassVar[list[Any]] = []

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        try:
            work = super().allreduce(tensors, opts)
            if not (opts and opts.asyncOp):
                work.wait()
        except RuntimeError:
            self.broken.append(self)
            raise
        return work

    def shutdown(self) -> None:
        if self not in self.broken:
            super().shutdown()

"""Faults of messages: what arrives, where, and in which order."""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import Any, ClassVar

import torch

from conformance.verdict import Verdict
from impl.gloo import ProcessGroupGloo
from tests.mutants.kit import ForwardingGroup, GroupFault, breaks
from tests.mutants.replacing import Finished, Wrapped


class _ChangesWhatArrives(ForwardingGroup):
    """Waits for what is received, and then does something to the tensor."""

    def spoil(self, x: torch.Tensor) -> None:
        raise NotImplementedError

    def recv(self, tensors: Any, src: int, tag: int) -> Any:
        work = self.inner.recv(tensors, src, tag)
        spoil = self.spoil

        class Spoiling(Wrapped):
            def wait(self, *timeout: Any) -> Any:
                self.work.wait(*timeout)
                spoil(tensors[0])
                return True

        return Spoiling(work)


@breaks("p2p/delivers", says=r"rank 0 is wrong\n7 of 7 elements differ")
class ArrivesRotated(_ChangesWhatArrives):
    """The last element comes first."""

    def spoil(self, x: torch.Tensor) -> None:
        x.copy_(x.roll(1))


@breaks("p2p/touches-nothing-else", says=r"around the view.*rank 1 is wrong\n")
class WritesOneTooMany(_ChangesWhatArrives):
    """The element after a received view is written too."""

    def spoil(self, x: torch.Tensor) -> None:
        if x._base is not None:
            x._base.view(-1)[x.storage_offset() + x.numel()] = 99.0


@breaks("p2p/touches-nothing-else", says=r"at \[1\]: 4 of 4 elements differ")
class ClearsWhatWasSent(ForwardingGroup):
    """A sent tensor is zero afterwards."""

    def send(self, tensors: Any, dst: int, tag: int) -> Any:
        work = self.inner.send(tensors, dst, tag)
        work.wait()
        tensors[0].zero_()
        return Finished()


@breaks("p2p/dtypes", says=r"rank 1 is wrong\n\d+ of \d+ elements differ, in uint8")
class TakesEverythingForFloat32(_ChangesWhatArrives):
    """Wide numbers lose their last digits."""

    def spoil(self, x: torch.Tensor) -> None:
        if x.dtype is torch.float64:
            x.copy_(x.float())


@breaks("p2p/shapes", says=r"1048576 of 2097152 elements differ")
class CutsLargeMessages(_ChangesWhatArrives):
    """What lies beyond four megabytes does not arrive."""

    def spoil(self, x: torch.Tensor) -> None:
        x.view(-1)[1 << 20 :] = 0


@breaks("p2p/zero-elements", says=r"rank 1 is wrong\n.*got b'', want b'1'")
class DoesNotWaitForEmptyMessages(ForwardingGroup):
    """A receive of nothing is over at once; its message is taken when it comes."""

    def recv(self, tensors: Any, src: int, tag: int) -> Any:
        work = self.inner.recv(tensors, src, tag)
        if tensors[0].numel():
            return work
        self.pending = work
        return Finished()


@breaks("p2p/zero-elements", says=r"rank \d  raised RuntimeError: nothing to send")
class SendsNoEmptyMessages(ForwardingGroup):
    """A message of nothing is an error."""

    def send(self, tensors: Any, dst: int, tag: int) -> Any:
        if not tensors[0].numel():
            raise RuntimeError("nothing to send")
        return self.inner.send(tensors, dst, tag)


@breaks("p2p/non-contiguous", says=r"rank 1 is wrong\n\d of 12 elements differ|setStorage: sizes")
class SendsRawStorage(ForwardingGroup):
    """A strided tensor is sent as if it were dense."""

    def send(self, tensors: Any, dst: int, tag: int) -> Any:
        x = tensors[0]
        dense = torch.as_strided(x, (x.numel(),), (1,), x.storage_offset())
        return self.inner.send([dense], dst, tag)

    def recv(self, tensors: Any, src: int, tag: int) -> Any:
        x = tensors[0]
        dense = torch.as_strided(x, (x.numel(),), (1,), x.storage_offset())
        return self.inner.recv([dense], src, tag)


def _as_it_lies(x: torch.Tensor) -> torch.Tensor:
    return x.t() if x.dim() == 2 and x.t().is_contiguous() else x


@breaks("p2p/non-contiguous", says=r"transposed: rank 1 is wrong")
class SendsColumnsForRows(GroupFault, ProcessGroupGloo):
    """A transposed matrix is sent and received in the order in which it lies in memory."""

    base = "impl"

    def send(self, tensors: Any, dst: int, tag: int) -> Any:
        return super().send([_as_it_lies(x) for x in tensors], dst, tag)

    def recv(self, tensors: Any, src: int, tag: int) -> Any:
        return super().recv([_as_it_lies(x) for x in tensors], src, tag)


@breaks("p2p/storage-offset", says=r"rank 1 is wrong\n5 of 20 elements differ")
class ForgetsTheOffset(ForwardingGroup):
    """A view is sent from the beginning of its storage."""

    def send(self, tensors: Any, dst: int, tag: int) -> Any:
        x = tensors[0]
        return self.inner.send([torch.as_strided(x, x.shape, x.stride(), 0)], dst, tag)


@breaks("p2p/buffer-is-free", says=r"rank 1 is wrong\n5 of 5 elements differ")
class SendsWhenItLikes(ForwardingGroup):
    """Says at once that a message is sent, and looks at the tensor a little later."""

    def send(self, tensors: Any, dst: int, tag: int) -> Any:
        def later() -> None:
            time.sleep(0.1)
            self.inner.send(tensors, dst, tag).wait()

        threading.Thread(target=later).start()
        return Finished()


@breaks("p2p/does-not-block", says=r"rank 0 waited in isend", verdict=Verdict.TIMEOUT)
class WaitsForTheReceiver(ForwardingGroup):
    """isend returns when the message has been taken."""

    def send(self, tensors: Any, dst: int, tag: int) -> Any:
        work = self.inner.send(tensors, dst, tag)
        work.wait()
        return Finished()


@breaks("p2p/tags", says=r"rank 1 is wrong\nat \[0\]: 4 of 4 elements differ")
class IgnoresTags(ForwardingGroup):
    """All messages go under one tag."""

    def send(self, tensors: Any, dst: int, tag: int) -> Any:
        return self.inner.send(tensors, dst, 0)

    def recv(self, tensors: Any, src: int, tag: int) -> Any:
        return self.inner.recv(tensors, src, 0)


@breaks("p2p/tags", says=r"tags=\(1, 257, 65537\)[\s\S]*rank 1 is wrong")
class ConfusesDistantTags(ForwardingGroup):
    """Tags are cut to eight bits."""

    def send(self, tensors: Any, dst: int, tag: int) -> Any:
        return self.inner.send(tensors, dst, tag % 256)

    def recv(self, tensors: Any, src: int, tag: int) -> Any:
        return self.inner.recv(tensors, src, tag % 256)


@breaks("p2p/any-order-of-posts", says=r"rank \d is wrong[\s\S]*Draw 1:")
class CutsWhatIsReceivedBehindAnother(ForwardingGroup):
    """A receive that is posted behind another one of the same sender loses its last element."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.before: dict[int, Any] = {}

    def recv(self, tensors: Any, src: int, tag: int) -> Any:
        is_behind = src in self.before and not self.before[src].waited
        cut = _Cut if is_behind else _Noted
        self.before[src] = cut(self.inner.recv(tensors, src, tag), tensors[0])
        return self.before[src]


class _Noted(Wrapped):
    """Knows whether somebody has waited for it."""

    waited = False

    def __init__(self, work: Any, tensor: torch.Tensor) -> None:
        super().__init__(work)
        self.tensor = tensor

    def wait(self, *timeout: Any) -> bool:
        self.waited = True
        return bool(self.work.wait(*timeout))


class _Cut(_Noted):
    def wait(self, *timeout: Any) -> bool:
        super().wait(*timeout)
        self.tensor.view(-1)[-1:] = 0
        return True


@breaks("p2p/many-pending", says=r"raised RuntimeError: 64 messages are under way")
class HasRoomForSixtyFour(ForwardingGroup):
    """There is a table of what is under way, and it is full soon."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.pending: list[Any] = []

    def noted(self, work: Any) -> Any:
        self.pending = [one for one in self.pending if not one.is_completed()]
        if len(self.pending) == 64:
            raise RuntimeError("64 messages are under way")
        self.pending.append(work)
        return work

    def send(self, tensors: Any, dst: int, tag: int) -> Any:
        return self.noted(self.inner.send(tensors, dst, tag))

    def recv(self, tensors: Any, src: int, tag: int) -> Any:
        return self.noted(self.inner.recv(tensors, src, tag))


@breaks("p2p/many-in-a-row", says=r"rank 1 is wrong\n1 of 1100 elements differ")
class CountsInTenBits(ForwardingGroup):
    """The message after the first 1024 is taken for the first."""

    count = 0
    first: Any = None

    def send(self, tensors: Any, dst: int, tag: int) -> Any:
        if self.count == 0:
            self.first = [x.clone() for x in tensors]
        chosen = self.first if self.count == 1024 else tensors
        self.count += 1
        return self.inner.send(chosen, dst, tag)


@breaks("p2p/order", says=r"rank 1 is wrong\nat \[0\]: 1 of 1 elements differ")
class SecondComesFirst(ForwardingGroup):
    """Of every three messages of a tag the first two change places."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.sent: Counter[tuple[int, int]] = Counter()
        self.received: Counter[tuple[int, int]] = Counter()

    def send(self, tensors: Any, dst: int, tag: int) -> Any:
        number = self.sent[dst, tag]
        self.sent[dst, tag] += 1
        return self.inner.send(tensors, dst, 8 * tag + (1, 0, 2)[number % 3])

    def recv(self, tensors: Any, src: int, tag: int) -> Any:
        number = self.received[src, tag]
        self.received[src, tag] += 1
        return self.inner.recv(tensors, src, 8 * tag + number % 3)


@breaks("p2p/groups-are-apart", says=r"rank 1 is wrong\nat \[0\]: 3 of 3 elements differ")
class OneMailboxForAllGroups(ForwardingGroup):
    """Groups of the same size share their messages."""

    mailboxes: ClassVar[dict[int, Any]] = {}

    def __init__(self, store: Any, rank: int, world_size: int, timeout: Any) -> None:
        super().__init__(store, rank, world_size, timeout)
        if rank == 0 and world_size == 1:
            self.mailboxes.clear()
        self.shared = self.mailboxes.setdefault(world_size, self.inner)

    def send(self, tensors: Any, dst: int, tag: int) -> Any:
        return self.shared.send(tensors, dst, tag)

    def recv(self, tensors: Any, src: int, tag: int) -> Any:
        return self.shared.recv(tensors, src, tag)


@breaks("p2p/beside-collectives", says=r"rank 0 is wrong\nat \[\d\]")
class ReducesByMessages(ForwardingGroup):
    """all_reduce exchanges messages under tag 0, among the user's own."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.sent: list[Any] = []

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        [x] = tensors
        mine = x.clone()
        for peer in range(self.size()):
            if peer != self.rank():
                other = torch.zeros_like(x)
                self.sent.append(self.inner.send([mine], peer, 0))
                self.inner.recv([other], peer, 0).wait()
                x.add_(other)
        return Finished()

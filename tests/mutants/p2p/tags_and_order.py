"""Mutants of conformance/spec/p2p/tags_and_order.py."""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from conformance.verdict import Verdict
from tests.mutants.kit import ForwardingGroup, breaks
from tests.mutants.p2p.kit import Messages
from tests.mutants.replacing import Finished, Wrapped


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


class _Noted(Wrapped):
    """Records whether wait was called."""

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


@breaks("p2p/any-order-of-posts", says=r"rank \d is wrong[\s\S]*Draw 1:")
class CutsSecondPendingReceives(ForwardingGroup):
    """A receive that is posted while another one of the same sender is pending loses its last
    element."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.before: dict[int, Any] = {}

    def recv(self, tensors: Any, src: int, tag: int) -> Any:
        is_behind = src in self.before and not self.before[src].waited
        cut = _Cut if is_behind else _Noted
        self.before[src] = cut(self.inner.recv(tensors, src, tag), tensors[0])
        return self.before[src]


@breaks("p2p/order", says=r"source=0[\s\S]*rank 1 is wrong\nat \[1\]: 1 of 1048576 elements differ")
class CutsLargeMessagesThatWaited(ForwardingGroup):
    """A large message loses its last element if a later one of another tag was received first."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.tags: set[int] = set()

    def recv(self, tensors: Any, src: int, tag: int) -> Any:
        self.tags.add(tag)
        work = self.inner.recv(tensors, src, tag)
        is_cut = len(self.tags) > 1 and tensors[0].nbytes > 1 << 20
        return _Cut(work, tensors[0]) if is_cut else work


@breaks("p2p/many-pending", says=r"raised RuntimeError: 64 messages are under way")
class SixtyFourPendingMessagesAtMost(ForwardingGroup):
    """The table of pending messages has sixty-four entries."""

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


class _Held(dist.Work):
    """Of a message that is sent by `send`, at the latest when it is waited for."""

    def __init__(self, send: Callable[[], Any]) -> None:
        super().__init__()
        self.send = functools.cache(send)  # once, however often it is asked for

    def wait(self, timeout: timedelta | None = None) -> bool:
        return bool(self.send().wait())


@breaks("p2p/order", says=r"rank 1 is wrong\nat \[0\]: 1 of 1 elements differ")
class SwapsTheFirstTwoMessages(ForwardingGroup):
    """Of every three messages of a tag, the first two are swapped."""

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


@breaks("p2p/order-of-sizes", says="Received data size", verdict=Verdict.CRASHED)
class SmallMessagesOvertakeLargeOnes(ForwardingGroup):
    """A message of a mebibyte is sent after the next smaller one, or when it is waited for."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.held: list[_Held] = []

    def send(self, tensors: Any, dst: int, tag: int) -> Any:
        if tensors[0].nbytes >= 1 << 20:
            self.held.append(_Held(lambda: self.inner.send(tensors, dst, tag)))
            return self.held[-1]
        work = self.inner.send(tensors, dst, tag)
        for large in self.held:
            large.send()
        self.held.clear()
        return work


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


@breaks("p2p/threads", says=r"rank 0 is wrong\nat \[0\]: got 0 values, want 5")
class OnlyOneThreadMaySend(Messages):
    """Only the thread that made the group may send."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(store, rank, size, timeout)
        self.owner = threading.get_ident()

    def send(self, tensors: Any, dst: int, tag: int = 0) -> Any:
        if threading.get_ident() != self.owner:
            raise RuntimeError("this is another thread")
        return super().send(tensors, dst, tag)


@breaks("p2p/tags", says=r"parameters  bit=24[\s\S]*rank 1 is wrong")
class TagsHave24Bits(ForwardingGroup):
    """Tags are cut to 24 bits."""

    def send(self, tensors: Any, dst: int, tag: int) -> Any:
        return self.inner.send(tensors, dst, tag % 2**24)

    def recv(self, tensors: Any, src: int, tag: int) -> Any:
        return self.inner.recv(tensors, src, tag % 2**24)

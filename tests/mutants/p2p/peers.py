"""Faults of messages on impl's backend: torch's own breaks most of these requirements itself."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

from impl.gloo import ProcessGroupGloo
from tests.mutants.kit import GroupFault, breaks
from tests.mutants.replacing import Finished, Wrapped


class _Messages(GroupFault, ProcessGroupGloo):
    """Every handle of a message is of the class `handle`."""

    base = "impl"
    handle: Any = Wrapped

    def send(self, tensors: Any, dst: int, tag: int = 0) -> Any:
        return self.handle(super().send(tensors, dst, tag))

    def recv(self, tensors: Any, src: int, tag: int = 0) -> Any:
        return self.handle(super().recv(tensors, src, tag))


@breaks("p2p/both-send-first", says=r"rank \d  raised RuntimeError: no room for 1048576 bytes")
class HasRoomForAHalf(_Messages):
    """What is sent and not waited for lies in a buffer, and that is full at half a megabyte."""

    def send(self, tensors: Any, dst: int, tag: int = 0) -> Any:
        if tensors[0].nbytes > 1 << 19:
            raise RuntimeError(f"no room for {tensors[0].nbytes} bytes")
        return super().send(tensors, dst, tag)


@breaks("p2p/threads", says=r"rank 0 is wrong\nat \[0\]: got 0 values, want 5")
class BelongsToOneThread(_Messages):
    """Only the thread that made the group may send."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(store, rank, size, timeout)
        self.owner = threading.get_ident()

    def send(self, tensors: Any, dst: int, tag: int = 0) -> Any:
        if threading.get_ident() != self.owner:
            raise RuntimeError("this is another thread")
        return super().send(tensors, dst, tag)


class _UsedUp(Wrapped):
    waits = 0

    def wait(self, *timeout: Any) -> bool:
        self.waits += 1
        if self.waits > 1:
            raise RuntimeError("nothing to wait for")
        return bool(self.work.wait(*timeout))


@breaks("p2p/wait-twice", says=r"raised RuntimeError: nothing to wait for")
class HandlesAreUsedUp(_Messages):
    """A handle is of no use once it was waited for."""

    handle = _UsedUp


class _EmptyResult(Wrapped):
    def result(self) -> list[Any]:
        return []


@breaks("p2p/future-and-result", says=r"rank 1 is wrong\nat \[0\]: got 0 values, want 1")
class MessagesHaveNoResult(_Messages):
    handle = _EmptyResult


@breaks("p2p/to-oneself", says=r"rank 0 is wrong\n3 of 3 elements differ")
class KeepsNothingForItself(_Messages):
    """A message to oneself need not travel, and does not arrive."""

    def send(self, tensors: Any, dst: int, tag: int = 0) -> Any:
        return Finished() if dst == self.rank() else super().send(tensors, dst, tag)

    def recv(self, tensors: Any, src: int, tag: int = 0) -> Any:
        return Finished() if src == self.rank() else super().recv(tensors, src, tag)


@breaks("p2p/peer-out-of-range", says="DID NOT RAISE")
class PeersWrapAround(_Messages):
    """The peer after the last one is the first."""

    def send(self, tensors: Any, dst: int, tag: int = 0) -> Any:
        return super().send(tensors, dst % self.size(), tag)


class _Tolerant(Wrapped):
    def wait(self, *timeout: Any) -> bool:
        try:
            return bool(self.work.wait(*timeout))
        except RuntimeError:
            return True


@breaks("p2p/longer-message", says="DID NOT RAISE")
@breaks("p2p/shorter-message", says="DID NOT RAISE")
class TakesWhateverComes(_Messages):
    """A message of another size than the tensor's is no error."""

    handle = _Tolerant

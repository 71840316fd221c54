"""Mutants of conformance/spec/p2p/handles.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from conformance.verdict import Verdict
from impl.gloo import ProcessGroupGloo
from tests.mutants.kit import ForwardingGroup, GroupMutant, breaks
from tests.mutants.p2p.kit import Messages
from tests.mutants.replacing import Finished, Wrapped


class _ChangesHandles(ForwardingGroup):
    """Every handle of a message is of the class `handle`."""

    handle: Any = Wrapped

    def send(self, tensors: Any, dst: int, tag: int) -> Any:
        return self.handle(self.inner.send(tensors, dst, tag))

    def recv(self, tensors: Any, src: int, tag: int) -> Any:
        return self.handle(self.inner.recv(tensors, src, tag))

    def recv_anysource(self, tensors: Any, tag: int) -> Any:
        return self.handle(self.inner.recv_anysource(tensors, tag))


class _AlwaysCompleted(Wrapped):
    def is_completed(self) -> bool:
        return True


@breaks("p2p/incomplete-before-the-message", says=r"completed before anything had been sent")
class CompletedFromTheStart(_ChangesHandles):
    """Handles report completion before the operation is complete."""

    handle = _AlwaysCompleted


class _CompletedByWait(Wrapped):
    waited = False

    def wait(self, *timeout: Any) -> bool:
        self.waited = bool(self.work.wait(*timeout))
        return self.waited

    def is_completed(self) -> bool:
        return self.waited


@breaks("p2p/completes-without-wait", says=r"isend never became completed without a wait")
class MessagesCompleteOnlyWhenWaitedFor(_ChangesHandles):
    """A handle does not report completion until wait was called."""

    handle = _CompletedByWait


class WrittenByWait(Wrapped):
    def __init__(self, work: Any, tensor: Tensor, arrived: Tensor) -> None:
        super().__init__(work)
        self.tensor, self.arrived = tensor, arrived

    def wait(self, *timeout: Any) -> bool:
        waited = bool(self.work.wait(*timeout))
        self.tensor.copy_(self.arrived)
        return waited


@breaks("p2p/completed-is-written", says=r"rank \d is wrong\n1048576 of 1048576 elements differ")
class ReceivesAreWrittenByWait(GroupMutant, ProcessGroupGloo):
    """A message stays in a tensor of the group's own until wait is called."""

    base = "impl"

    def recv(self, tensors: Any, src: int, tag: int) -> Any:
        arrived = torch.empty_like(tensors[0])
        return WrittenByWait(super().recv([arrived], src, tag), tensors[0], arrived)


class _SentByWait:
    """Of a message that is not on its way yet."""

    def __init__(self, send: Callable[[], Any]) -> None:
        self.send = send

    def wait(self, *timeout: Any) -> bool:
        return bool(self.send().wait(*timeout))


@breaks("p2p/dropped-handles", says=r"rank 1 waited in recv #1", verdict=Verdict.TIMEOUT)
class SendsWhenWaitedFor(ForwardingGroup):
    """A message is sent only when its handle is waited for, and never if that is dropped."""

    def send(self, tensors: Any, dst: int, tag: int) -> Any:
        return _SentByWait(lambda: self.inner.send(tensors, dst, tag))


class _NeverSuccessful(Wrapped):
    def is_success(self) -> bool:
        return False


@breaks("p2p/handle-after-wait", says=r"rank 0 is wrong\nat \[1\]: got False, want True")
class NeverSuccessful(_ChangesHandles):
    """Handles never report success."""

    handle = _NeverSuccessful


class _OneTooHigh(Wrapped):
    def source_rank(self) -> int:
        return int(self.work.source_rank()) + 1

    _source_rank = source_rank


@breaks("p2p/source-rank", says=r"rank \d is wrong\ngot \d, want \d")
class SourcesCountFromOne(_ChangesHandles):
    """The source of a message is reported one too high."""

    handle = _OneTooHigh


class _ForgivesTimeouts(Wrapped):
    def wait(self, *timeout: Any) -> bool:
        try:
            return bool(self.work.wait(*timeout))
        except RuntimeError:
            return False


@breaks("p2p/wait-timeout", says="wait returned before the send was over")
class SendsEndAtTheTimeout(_ChangesHandles):
    """wait for a send returns when its timeout is over, as if the message had gone."""

    def send(self, tensors: Any, dst: int, tag: int) -> Any:
        return _ForgivesTimeouts(self.inner.send(tensors, dst, tag))


class _Patient(Wrapped):
    def wait(self, *timeout: Any) -> bool:
        return bool(self.work.wait())


@breaks("p2p/wait-timeout", says=r"is_send=True", verdict=Verdict.TIMEOUT)
class SendsHaveNoTimeout(_ChangesHandles):
    """wait for a send uses only the group's timeout."""

    def send(self, tensors: Any, dst: int, tag: int) -> Any:
        return _Patient(self.inner.send(tensors, dst, tag))


@breaks("p2p/wait-timeout", says="wait returned, and nothing had been sent")
class ReceivesEndAtTheTimeout(_ChangesHandles):
    """wait for a receive returns when its timeout is over, as if the message had come."""

    def recv(self, tensors: Any, src: int, tag: int) -> Any:
        return _ForgivesTimeouts(self.inner.recv(tensors, src, tag))


class _HasNoPatience(Wrapped):
    def wait(self, *timeout: Any) -> bool:
        if timeout and not self.work.is_completed():
            raise RuntimeError("not completed yet")
        return bool(self.work.wait())


@breaks("p2p/wait-timeout", says=r"wait gave up after 0\.0\d* s of 0\.1 s|not completed yet")
class WaitTimesOutAtOnce(_ChangesHandles):
    """wait with a timeout does not wait."""

    handle = _HasNoPatience


@breaks("p2p/does-not-block", says=r"rank 0 waited in isend", verdict=Verdict.TIMEOUT)
class WaitsForTheReceiver(ForwardingGroup):
    """isend returns only when the message has been received."""

    def send(self, tensors: Any, dst: int, tag: int) -> Any:
        work = self.inner.send(tensors, dst, tag)
        work.wait()
        return Finished()


@breaks("p2p/both-send-first", says=r"rank \d  raised RuntimeError: no room for 1048576 bytes")
class BuffersHalfAMegabyteOfSends(Messages):
    """Pending sends are kept in a buffer, which is full at half a megabyte."""

    def send(self, tensors: Any, dst: int, tag: int = 0) -> Any:
        if tensors[0].nbytes > 1 << 19:
            raise RuntimeError(f"no room for {tensors[0].nbytes} bytes")
        return super().send(tensors, dst, tag)


class _UsedUp(Wrapped):
    waits = 0

    def wait(self, *timeout: Any) -> bool:
        self.waits += 1
        if self.waits > 1:
            raise RuntimeError("nothing to wait for")
        return bool(self.work.wait(*timeout))


@breaks("p2p/wait-twice", says=r"raised RuntimeError: nothing to wait for")
class HandlesCanBeWaitedForOnce(Messages):
    """A second wait on a handle raises."""

    handle = _UsedUp


class _EmptyResult(Wrapped):
    def result(self) -> list[Any]:
        return []


@breaks("p2p/future-and-result", says=r"rank 1 is wrong\nat \[0\]: got 0 values, want 1")
class MessagesHaveNoResult(Messages):
    handle = _EmptyResult

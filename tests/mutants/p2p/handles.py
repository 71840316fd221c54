"""Faults of handles, peers and batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from conformance.verdict import Verdict
from impl.gloo import ProcessGroupGloo
from tests.mutants.kit import ForwardingGroup, GroupFault, Patch, breaks
from tests.mutants.replacing import Finished, Wrapped, replaced


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
    """Handles say that they are over when they are not."""

    handle = _AlwaysCompleted


class _CompletedByWait(Wrapped):
    waited = False

    def wait(self, *timeout: Any) -> bool:
        self.waited = bool(self.work.wait(*timeout))
        return self.waited

    def is_completed(self) -> bool:
        return self.waited


@breaks("p2p/completes-without-wait", says=r"isend never became completed without a wait")
class CompletedWhenWaitedFor(_ChangesHandles):
    """A handle does not know that it is over until somebody has waited for it."""

    handle = _CompletedByWait


class _WrittenByWait(Wrapped):
    def __init__(self, work: Any, tensor: Tensor, arrived: Tensor) -> None:
        super().__init__(work)
        self.tensor, self.arrived = tensor, arrived

    def wait(self, *timeout: Any) -> bool:
        waited = bool(self.work.wait(*timeout))
        self.tensor.copy_(self.arrived)
        return waited


@breaks("p2p/completed-is-written", says=r"rank \d is wrong\n1048576 of 1048576 elements differ")
class ReceivesAreWrittenByWait(GroupFault, ProcessGroupGloo):
    """What has arrived is in a tensor of the group's own until somebody waits."""

    base = "impl"

    def recv(self, tensors: Any, src: int, tag: int) -> Any:
        arrived = torch.empty_like(tensors[0])
        return _WrittenByWait(super().recv([arrived], src, tag), tensors[0], arrived)


class _SentByWait:
    """Of a message that is not on its way yet."""

    def __init__(self, send: Callable[[], Any]) -> None:
        self.send = send

    def wait(self, *timeout: Any) -> bool:
        return bool(self.send().wait(*timeout))


@breaks("p2p/dropped-handles", says=r"rank 1 waited in recv #1", verdict=Verdict.TIMEOUT)
class SendsWhenWaitedFor(ForwardingGroup):
    """A message goes out when its handle is waited for: never, if that is dropped."""

    def send(self, tensors: Any, dst: int, tag: int) -> Any:
        return _SentByWait(lambda: self.inner.send(tensors, dst, tag))


class _NeverSuccessful(Wrapped):
    def is_success(self) -> bool:
        return False


@breaks("p2p/handle-after-wait", says=r"rank 0 is wrong\nat \[1\]: got False, want True")
class NeverSuccessful(_ChangesHandles):
    """Handles do not know that all went well."""

    handle = _NeverSuccessful


class _OneTooHigh(Wrapped):
    def source_rank(self) -> int:
        return int(self.work.source_rank()) + 1

    _source_rank = source_rank


@breaks("p2p/source-rank", says=r"rank \d is wrong\ngot \d, want \d")
class SourcesCountFromOne(_ChangesHandles):
    """The source of a message is one too high."""

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
    """wait for a send looks at the group's timeout alone."""

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
class GivesUpAtOnce(_ChangesHandles):
    """wait with a timeout does not wait."""

    handle = _HasNoPatience


class _FromTheFirst(Wrapped):
    def _source_rank(self) -> int:
        return 0


@breaks("p2p/any-source", says=r"rank 0 is wrong\ngot keys \[0\], want \[0, 1\]")
class SenderIsAlwaysTheFirst(ForwardingGroup):
    """A receive from anybody names rank 0, whoever sent."""

    def recv_anysource(self, tensors: Any, tag: int) -> Any:
        return _FromTheFirst(self.inner.recv_anysource(tensors, tag))


@breaks("p2p/any-source-each-once", says=r"rank 0 is wrong\n")
class DeliversTheFirstTwice(ForwardingGroup):
    """The first message from anybody takes the place of the second one."""

    first: torch.Tensor | None = None
    count = 0

    def recv_anysource(self, tensors: Any, tag: int) -> Any:
        work = self.inner.recv_anysource(tensors, tag)
        work.wait()
        self.count += 1
        if self.first is None:
            self.first = tensors[0].clone()
        elif self.count == 2:
            tensors[0].copy_(self.first)
        return _WaitedFor(work)


class _WaitedFor(Wrapped):
    """gloo's own would wait for a second message."""

    def wait(self, *timeout: Any) -> bool:
        return True


@breaks("p2p/any-source-tag", says=r"rank 1 is wrong\nat \[0\]: 2 of 2 elements differ")
class TagsAreForNamedSources(ForwardingGroup):
    """A receive from anybody takes what came first, whatever its tag."""

    def send(self, tensors: Any, dst: int, tag: int) -> Any:
        return self.inner.send(tensors, dst, 0)

    def recv_anysource(self, tensors: Any, tag: int) -> Any:
        return self.inner.recv_anysource(tensors, 0)


@breaks("p2p/any-source-in-a-subgroup", says=r"recv returned 0, want 1")
class SourcesAreGroupRanks(Patch):
    """recv returns the sender's rank in the group."""

    @staticmethod
    @contextmanager
    def patched() -> Iterator[None]:
        with replaced(get_global_rank=lambda _: lambda group, rank: rank):
            yield


@breaks("p2p/recv-returns-the-source", says=r"got NoneType None, want int 0")
class ReturnsNothing(Patch):
    """recv with a source does not say where the message came from."""

    @staticmethod
    @contextmanager
    def patched() -> Iterator[None]:
        def silent(recv: Any) -> Any:
            def received(*args: Any, **kwargs: Any) -> None:
                recv(*args, **kwargs)

            return received

        with replaced(recv=silent):
            yield


@breaks("p2p/blocking-to-oneself", says=r"RuntimeError")
class TriesToTalkToItself(Patch):
    """The own rank is a peer like any other."""

    @staticmethod
    @contextmanager
    def patched() -> Iterator[None]:
        with replaced(_check_not_self_rank=lambda _: lambda group, rank, kind: None):
            yield


@breaks("p2p/peer-arguments", says="DID NOT RAISE")
class TakesEitherName(Patch):
    """Of two names for a peer one is simply taken."""

    @staticmethod
    @contextmanager
    def patched() -> Iterator[None]:
        def lenient(canonicalize: Any) -> Any:
            def either(group: Any, one: Any = None, other: Any = None, *rest: Any) -> Any:
                return canonicalize(group, None if other is not None else one, other, *rest)

            return either

        with replaced(_canonicalize_group_rank=lenient):
            yield


@breaks("p2p/negative-tag", says="DID NOT RAISE")
class TagsLoseTheirSign(ForwardingGroup):
    """A negative tag is as good as a positive one."""

    def send(self, tensors: Any, dst: int, tag: int) -> Any:
        self.inner.send(tensors, dst, abs(tag))
        return Finished()


@breaks("p2p/no-tag", says="DID NOT RAISE")
class RoundsTags(ForwardingGroup):
    """A tag is whatever becomes an integer of 32 bits."""

    def send(self, tensors: Any, dst: int, tag: Any) -> Any:
        return self.inner.send(tensors, dst, int(tag) % (1 << 31))


@breaks("p2p/needs-a-tensor", says=r"AttributeError|DID NOT RAISE|TypeError")
class TakesListsForTensors(Patch):
    """Nobody looks at what is to be sent."""

    @staticmethod
    @contextmanager
    def patched() -> Iterator[None]:
        with replaced(_check_single_tensor=lambda _: lambda param, name: None):
            yield


@breaks("p2p/batch-in-a-subgroup", says=r"rank 1  raised RuntimeError")
@breaks("p2p/subgroup-peers", says=r"rank \d (is wrong|raised)|rank \d  raised")
class GroupRanksGoBackwards(Patch):
    """Global ranks become group ranks from the wrong end."""

    @staticmethod
    @contextmanager
    def patched() -> Iterator[None]:
        def backwards(get_group_rank: Any) -> Any:
            def translated(group: Any, rank: int) -> int:
                number = int(get_group_rank(group, rank))
                whole = group is dist.group.WORLD
                return number if whole else dist.get_world_size(group) - 1 - number

            return translated

        with replaced(get_group_rank=backwards):
            yield


@breaks("p2p/batch", says=r"rank 0 is wrong\n4 of 4 elements differ")
class BatchesReceiveIntoCopies(Patch):
    """The tensors in which the messages of a batch arrive are not the caller's."""

    @staticmethod
    @contextmanager
    def patched() -> Iterator[None]:
        def copying(batch: Any) -> Any:
            isend = dist.isend

            def on_copies(ops: Any) -> Any:
                for op in ops:
                    if op.op is not isend:
                        op.tensor = op.tensor.clone()
                return batch(ops)

            return on_copies

        with replaced(batch_isend_irecv=copying):
            yield


@breaks("p2p/batch-order", says=r"rank 0 is wrong\nat \[0\]: 100000 of 100000 elements differ")
class BatchesSendBackwards(Patch):
    """The sends of a batch go out from the last to the first."""

    @staticmethod
    @contextmanager
    def patched() -> Iterator[None]:
        def backwards(batch: Any) -> Any:
            isend = dist.isend
            return lambda ops: batch(
                [
                    *reversed([op for op in ops if op.op is isend]),
                    *(op for op in ops if op.op is not isend),
                ]
            )

        with replaced(batch_isend_irecv=backwards):
            yield


@breaks("p2p/batch-arguments", says="call 4 was accepted")
class BatchesTakeAnything(Patch):
    """Nobody looks whether a batch is one of messages, or of one group."""

    @staticmethod
    @contextmanager
    def patched() -> Iterator[None]:
        with replaced(batch_isend_irecv=lambda _: lambda ops: [Finished() for _ in ops]):
            yield

"""Mutants of conformance/spec/p2p/any_source.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from impl.transport.base import ANY_SOURCE
from tests.mutants.kit import ForwardingGroup, Patch, breaks
from tests.mutants.replacing import MethodMutant, Wrapped, replaced


class _FromTheFirst(Wrapped):
    def _source_rank(self) -> int:
        return 0


@breaks("p2p/any-source", says=r"rank 0 is wrong\ngot keys \[0\], want \[0, 1\]")
class SourceIsAlwaysRankZero(ForwardingGroup):
    """A receive without a source names rank 0, whichever rank sent."""

    def recv_anysource(self, tensors: Any, tag: int) -> Any:
        return _FromTheFirst(self.inner.recv_anysource(tensors, tag))


class _WaitedFor(Wrapped):
    """gloo's own would wait for a second message."""

    def wait(self, *timeout: Any) -> bool:
        return True


@breaks("p2p/any-source-each-once", says=r"rank 0 is wrong\n")
class DeliversTheFirstTwice(ForwardingGroup):
    """A receive without a source gets the first message again in place of the second one."""

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


class _OfTheLatest(Wrapped):
    """Knows the source of the last message that the group received."""

    latest: list[int]

    def wait(self, *timeout: Any) -> bool:
        done = bool(self.work.wait(*timeout))
        self.latest.append(self.work.source_rank())
        return done

    def source_rank(self) -> int:
        return self.latest[-1]


@breaks("p2p/source-of-each-handle", says=r"the handles tell \[(\d), \1\]")
class OneSourceForAllHandles(ForwardingGroup):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.latest: list[int] = []

    def recv_anysource(self, tensors: Any, tag: int) -> Any:
        work = _OfTheLatest(self.inner.recv_anysource(tensors, tag))
        work.latest = self.latest
        return work


@breaks("p2p/any-source-tag", says=r"rank 1 is wrong\nat \[0\]: 2 of 2 elements differ")
class AnySourceReceiveIgnoresTags(ForwardingGroup):
    """A receive without a source takes the first message to arrive, whatever its tag."""

    def send(self, tensors: Any, dst: int, tag: int) -> Any:
        return self.inner.send(tensors, dst, 0)

    def recv_anysource(self, tensors: Any, tag: int) -> Any:
        return self.inner.recv_anysource(tensors, 0)


@breaks("p2p/any-source-in-a-subgroup", says=r"recv returned 0, want 1")
class AnySourceReceiveReturnsGroupRanks(Patch):
    """recv returns the sender's rank in the group."""

    @staticmethod
    @contextmanager
    def patched() -> Iterator[None]:
        with replaced(get_global_rank=lambda _: lambda group, rank: rank):
            yield


@breaks("p2p/any-source-each-once", says=r"source=None[\s\S]*rank 0 sent \d+ bytes")
class AnySourceTakesTheLatest(MethodMutant):
    """Of more than two messages that wait, a receive without a source takes the latest."""

    base = "impl"
    of = "impl.transport.shm.matching:Matcher"

    @staticmethod
    def post(right: Callable[..., Any], matcher: Any, source: int, *rest: Any) -> Any:
        if source != ANY_SOURCE or len(matcher._unexpected) < 3:
            return right(matcher, source, *rest)
        matcher._unexpected.reverse()
        try:
            return right(matcher, source, *rest)
        finally:
            matcher._unexpected.reverse()

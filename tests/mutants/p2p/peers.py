"""Mutants of conformance/spec/p2p/peers.py."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.mutants.kit import ForwardingGroup, Patch, breaks
from tests.mutants.p2p.kit import Messages
from tests.mutants.replacing import Finished, Replacing, Wrapped, replaced


@breaks("p2p/peer-outside-the-group", says="rank 1  raised RuntimeError")
@breaks("groups/root-outside", says=r"broadcast was accepted")
class RootsOutsideMeanTheFirst(Replacing):
    """A root that is not a member is taken for the first member."""

    @staticmethod
    def get_group_rank(right: Any, group: Any, rank: int) -> Any:
        try:
            return right(group, rank)
        except ValueError:
            return 0


@breaks("p2p/blocking-to-oneself", says=r"RuntimeError")
class TakesItselfAsAPeer(Patch):
    """send and recv accept the rank itself as peer."""

    @staticmethod
    @contextmanager
    def patched() -> Iterator[None]:
        with replaced(_check_not_self_rank=lambda _: lambda group, rank, kind: None):
            yield


@breaks("p2p/peer-arguments", says="DID NOT RAISE")
class TakesBothNamesOfAPeer(Patch):
    """If a peer is given both ways, one of the two is used."""

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
    """A negative tag is accepted."""

    def send(self, tensors: Any, dst: int, tag: int) -> Any:
        self.inner.send(tensors, dst, abs(tag))
        return Finished()


@breaks("p2p/no-tag", says="DID NOT RAISE")
class ConvertsTags(ForwardingGroup):
    """Anything that can be converted to a 32-bit integer is accepted as a tag."""

    def send(self, tensors: Any, dst: int, tag: Any) -> Any:
        return self.inner.send(tensors, dst, int(tag) % (1 << 31))


@breaks("p2p/needs-a-tensor", says=r"AttributeError|DID NOT RAISE|TypeError")
class TakesListsForTensors(Patch):
    """The type of what is to be sent is not checked."""

    @staticmethod
    @contextmanager
    def patched() -> Iterator[None]:
        with replaced(_check_single_tensor=lambda _: lambda param, name: None):
            yield


@breaks("p2p/to-oneself", says=r"rank 0 is wrong\n3 of 3 elements differ")
class LosesMessagesToItself(Messages):
    """A message from a rank to itself does not arrive."""

    def send(self, tensors: Any, dst: int, tag: int = 0) -> Any:
        return Finished() if dst == self.rank() else super().send(tensors, dst, tag)

    def recv(self, tensors: Any, src: int, tag: int = 0) -> Any:
        return Finished() if src == self.rank() else super().recv(tensors, src, tag)


@breaks("p2p/peer-out-of-range", says="DID NOT RAISE")
class PeersWrapAround(Messages):
    """The peer after the last rank is taken for the first."""

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
class TakesMessagesOfAnySize(Messages):
    """A message of another size than the tensor's raises no error."""

    handle = _Tolerant


@breaks("p2p/negative-tag", says=r"raised RuntimeError: .*[Tt]ag")
class TellsOfARefusedTagAgain(ForwardingGroup):
    """The error of a refused message is raised again by the next one."""

    error: Exception | None = None

    def forward(self, method: str, *args: Any, **kwargs: Any) -> Any:
        error, self.error = self.error, None
        if error is not None:
            raise error
        try:
            return super().forward(method, *args, **kwargs)
        except RuntimeError as refusal:
            self.error = refusal
            raise

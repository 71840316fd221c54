"""Mutants of conformance/spec/collectives/lazy_bits.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from tests.mutants.collectives.kit import AroundImpl, inputs_mapped, mapped, without_neg_bit
from tests.mutants.kit import breaks
from tests.mutants.replacing import Replacing


def without_conj_bit(x: Tensor) -> Tensor:
    return x.conj() if x.is_conj() else x


class _BlindToInputs(AroundImpl):
    """What is only read is read as it lies in memory."""

    @staticmethod
    def bare(x: Tensor) -> Tensor:
        raise NotImplementedError

    def around(self, right: Callable[..., Any], taken: Any, *rest: Any) -> Any:
        return right(taken, *inputs_mapped(self.bare, *rest))


class _BlindToOutputs(_BlindToInputs):
    """What is written is written into memory as it is."""

    def around(self, right: Callable[..., Any], taken: Any, *rest: Any) -> Any:
        return right(mapped(self.bare, taken), *rest)


@breaks("negated/read", says=r"given with the bit: rank 0 is wrong")
@breaks("negated/scatter", says=r"given with the bit: rank 0 is wrong")
class ReadsBehindTheNegBit(_BlindToInputs):
    bare = staticmethod(without_neg_bit)


@breaks("negated/written", says=r"taken with the bit: rank 0 is wrong")
class WritesBehindTheNegBit(_BlindToOutputs):
    bare = staticmethod(without_neg_bit)


@breaks("conjugated/read", says=r"given with the bit: rank 0 is wrong")
@breaks("conjugated/gather", says=r"given with the bit: rank 0 is wrong")
class ReadsBehindTheConjBit(_BlindToInputs):
    bare = staticmethod(without_conj_bit)


@breaks("conjugated/reduced", says=r"taken with the bit: rank 0 is wrong")
class WritesBehindTheConjBit(_BlindToOutputs):
    bare = staticmethod(without_conj_bit)


@breaks("conjugated/written", says=r"taken with the bit: rank 0 is wrong")
@breaks("p2p/conjugated", says=r"conj.*: rank 1 is wrong")
class ViewsConjugatesAsRealNumbers(Replacing):
    """torch's own functions refuse what these take as it lies in memory."""

    @staticmethod
    def all_gather(right: Any, tensors: list[Tensor], *args: Any, **how: Any) -> Any:
        return right([without_conj_bit(x) for x in tensors], *args, **how)

    @staticmethod
    def irecv(right: Any, tensor: Tensor, *args: Any, **how: Any) -> Any:
        return right(without_conj_bit(tensor), *args, **how)

"""Mutants of conformance/spec/collectives/reduce_op.py."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch.distributed as dist

from tests.mutants.kit import Patch, breaks

Op = dist.ReduceOp


@breaks("reduce_op/is-a-reduce-op", says=r"returned \['premul_sum\(2\.0\)', 'premul_sum\(1\.5\)")
class FactoryReturnsAPair(Patch):
    """A scaled sum is a pair."""

    @staticmethod
    @contextmanager
    def patched() -> Iterator[None]:
        with mock.patch.object(
            dist, "_make_nccl_premul_sum", lambda factor: ("PREMUL_SUM", factor)
        ):
            yield


def without_factor(op: Any, *_: Any) -> Any:
    """The kind alone."""
    kind, _factor = op.__getstate__()
    return Op(Op.SUM if kind == Op.PREMUL_SUM else kind)


@breaks("reduce_op/copies", says=r"returned \['premul_sum\(2\.0\)', 'premul_sum\(1\.5\)")
class ADeepCopyLosesTheFactor(Patch):
    @staticmethod
    @contextmanager
    def patched() -> Iterator[None]:
        with mock.patch.object(Op, "__deepcopy__", without_factor):
            yield


@breaks("reduce_op/pickles", says=r"returned \['premul_sum\(2\.0\)'")
class PickledOpsBecomeSums(Patch):
    """Of an operation, the class alone goes through pickle."""

    @staticmethod
    @contextmanager
    def patched() -> Iterator[None]:
        with mock.patch.object(Op, "__reduce_ex__", return_value=(Op, (Op.SUM,))):
            yield


@breaks("reduce_op/equality", says=r"sum equals avg")
class AllOpsAreEqual(Patch):
    """Any two objects of the class are equal."""

    @staticmethod
    @contextmanager
    def patched() -> Iterator[None]:
        with mock.patch.object(Op, "__eq__", lambda _op, other: isinstance(other, Op)):
            yield

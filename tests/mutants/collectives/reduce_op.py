"""Reduce operations as objects, and those that are taken for another one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from conformance.target import Target
from tests.mutants.kit import ForwardingGroup, Patch, breaks
from tests.mutants.replacing import Replacing

Op = dist.ReduceOp


@breaks("reductions/min", says=r"reduce_op='min'[\s\S]*rank 0 is wrong")
class MinOfAReduceScatterIsMax(ForwardingGroup):
    """The table of one collective has the same entry twice."""

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        if opts.reduceOp == Op.MIN:
            opts.reduceOp = Op.MAX
        return super().reduce_scatter(outputs, inputs, opts)


@breaks("reductions/bor", says=r"reduce_op='bor'[\s\S]*rank 0 is wrong")
class BitsInBothRanksCancel(ForwardingGroup):
    """OR is exclusive."""

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        if opts.reduceOp == Op.BOR:
            opts.reduceOp = Op.BXOR
        return super().allreduce(tensors, opts)


@breaks("reductions/bxor", says=r"reduce_op='bxor'[\s\S]*rank 0 is wrong")
class BitsInBothRanksStay(ForwardingGroup):
    """Exclusive OR is not."""

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        if opts.reduceOp == Op.BXOR:
            opts.reduceOp = Op.BOR
        return super().allreduce(tensors, opts)


@breaks("reductions/premul-sum", says=r"got 3.0, want 1.5")
class IgnoresTheFactor(ForwardingGroup):
    """PREMUL_SUM is claimed, and is SUM."""

    @classmethod
    def target(cls) -> Target:
        plain = super().target()
        ops = plain.capabilities.reduce_ops | {"premul_sum"}
        return replace(plain, capabilities=replace(plain.capabilities, reduce_ops=ops))

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        if opts.reduceOp == Op.PREMUL_SUM:
            opts.reduceOp = Op.SUM
        return super().allreduce(tensors, opts)


@breaks("reductions/not-an-op", says=r"'sum' was taken")
class TakesNamesOfOps(Replacing):
    """What is no operation is looked up by its name, or else SUM."""

    @staticmethod
    def all_reduce(right: Any, tensor: Any, op: Any = Op.SUM, *args: Any, **how: Any) -> Any:
        if not isinstance(op, Op):
            op = getattr(Op, str(op).upper(), Op.SUM)
        return right(tensor, op, *args, **how)


@breaks("dtypes/reduced", says=r"bfloat16.*rank 0 is wrong")
class TakesBfloat16ForFloat16(ForwardingGroup):
    """Numbers of two bytes are added as float16."""

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        as_half = [x.view(torch.float16) if x.dtype is torch.bfloat16 else x for x in tensors]
        return super().allreduce(as_half, opts)


@breaks("reduce_op/is-a-reduce-op", says=r"returned \['premul_sum\(2\.0\)', 'premul_sum\(1\.5\)")
class TheFactoryReturnsAnOpAndAFactor(Patch):
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
class PicklesAreSums(Patch):
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

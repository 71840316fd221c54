"""Mutants of conformance/spec/collectives/refused_reductions.py."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from impl.gloo import ProcessGroupGloo
from tests.mutants.collectives.kit import mapped
from tests.mutants.collectives.reductions import reduces_by
from tests.mutants.kit import ForwardingGroup, GroupMutant, Patch, breaks
from tests.mutants.replacing import Replacing

Op = dist.ReduceOp


@breaks("reductions/complex-refused", says=r"all_reduce: MIN of complex64 should be refused")
@breaks(
    "all_reduce_coalesced/complex-order-refused", says=r"got 'returned None', want 'ValueError'"
)
class ComparesComplexNumbers(Patch):
    """The greatest of complex numbers is that of their parts."""

    @staticmethod
    @contextlib.contextmanager
    def patched() -> Iterator[None]:
        right = distributed_c10d.supports_complex
        distributed_c10d.supports_complex = lambda *_args, **_kwargs: True
        try:
            yield
        finally:
            distributed_c10d.supports_complex = right


class _ComparesPartsWith(ForwardingGroup):
    """One collective takes complex tensors as twice as many real ones, whatever the operation."""

    collective: str

    def _with_parts(self, collective: str, right: Any, *args: Any) -> Any:
        *tensors, opts = args
        if collective != self.collective or opts.reduceOp == Op.SUM:
            return right(*args)
        return right(*(mapped(torch.view_as_real, one) for one in tensors), opts)

    def reduce(self, *args: Any) -> Any:
        return self._with_parts("reduce", super().reduce, *args)

    def reduce_scatter(self, *args: Any) -> Any:
        return self._with_parts("reduce_scatter", super().reduce_scatter, *args)

    def reduce_scatter_single(self, *args: Any) -> Any:
        return self._with_parts("reduce_scatter_tensor", super().reduce_scatter_single, *args)


_REFUSED = "MIN of complex64 should be refused as complex: ''"


@breaks("reductions/not-an-op", says=r"'sum' was taken")
class TakesNamesOfOps(Replacing):
    """What is no operation is looked up by its name, or else SUM."""

    @staticmethod
    def all_reduce(right: Any, tensor: Any, op: Any = Op.SUM, *args: Any, **how: Any) -> Any:
        if not isinstance(op, Op):
            op = getattr(Op, str(op).upper(), Op.SUM)
        return right(tensor, op, *args, **how)


@breaks("reductions/complex-refused", says=f"reduce: {_REFUSED}")
class ReduceComparesParts(_ComparesPartsWith):
    collective = "reduce"


@breaks("reductions/complex-refused", says=f"reduce_scatter: {_REFUSED}")
class ReduceScatterComparesParts(_ComparesPartsWith):
    collective = "reduce_scatter"


@breaks("reductions/complex-refused", says=f"reduce_scatter_tensor: {_REFUSED}")
class ReduceScatterTensorComparesParts(_ComparesPartsWith):
    collective = "reduce_scatter_tensor"


@breaks("reductions/complex-refused-as-values", says=r"got 'RuntimeError', want 'ValueError'")
class TellsOfComplexAtRunTime(GroupMutant, ProcessGroupGloo):
    """What a reduce cannot do with complex tensors is an error of the run."""

    base = "impl"

    def reduce(self, tensors: Any, opts: Any = None) -> Any:
        try:
            return super().reduce(tensors, opts)
        except ValueError as error:
            raise RuntimeError(str(error)) from error


@breaks("reductions/bits-of-floats-refused", says=r"should be refused by its name")
class CombinesBitsOfFloats(ForwardingGroup):
    """Takes the bits of a float for those of an integer."""

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        [x] = tensors
        if reduces_by(opts, Op.BAND, Op.BOR, Op.BXOR) and x.dtype is torch.float32:
            x = x.view(torch.int32)
        return super().allreduce([x], opts)

"""What mutants of DTensors are about, and torch's code with its faults mended."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import tensor as dt
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from conformance.spec.dtensor.tables import part_of
from tests.mutants.kit import Patch
from tests.mutants.replacing import MethodMutant, methods_replaced

FRONT = "torch.distributed.tensor"
PLACEMENTS = f"{FRONT}.placement_types"
aten = torch.ops.aten


class FrontMutant(MethodMutant):
    """Replaces a function of torch.distributed.tensor."""

    of = FRONT


class TensorMutant(MethodMutant):
    of = f"{FRONT}:DTensor"


class ShardMutant(MethodMutant):
    of = f"{PLACEMENTS}:Shard"


def with_other_gradient(x: Any, factor: float) -> Any:
    """The same numbers, whose gradient goes back multiplied."""
    return x.detach() + (x - x.detach()) * factor


@contextmanager
def operator_replaced(op: Any, wrong: Callable[..., Any]) -> Iterator[None]:
    """While this lasts, an operator of DTensors is `wrong(right, *args, **kwargs)`."""
    handlers: Any = DTensor._op_dispatcher._custom_op_handlers
    before = dict(handlers)

    def right(*args: Any, **kwargs: Any) -> Any:
        now = dict(handlers)
        handlers.pop(op)
        if op in before:
            handlers[op] = before[op]
        try:
            return op(*args, **kwargs)
        finally:
            handlers.clear()
            handlers.update(now)

    def handler(_: Any, args: Any, kwargs: Any) -> Any:
        return wrong(right, *args, **kwargs)

    with mock.patch.dict(handlers, {op: handler}):
        yield


def operator_named(name: str) -> Any:
    """Such as "add.Tensor"."""
    packet, _, overload = name.partition(".")
    return getattr(getattr(aten, packet), overload or "default")


def spoiled(value: Any) -> Any:
    """On all ranks but the first, other numbers."""
    if isinstance(value, tuple | list):
        return [spoiled(value[0]), *value[1:]]
    if dist.get_rank():
        local = value._local_tensor
        value._local_tensor = ~local if local.dtype == torch.bool else local + 1
    return value


class OperatorMutant(Patch):
    """Operators of DTensors whose results are others on all ranks but the first."""

    ops: ClassVar[tuple[str, ...]]

    @staticmethod
    def wrong(right: Any, *args: Any, **kwargs: Any) -> Any:
        return spoiled(right(*args, **kwargs))

    @classmethod
    @contextmanager
    def patched(cls) -> Iterator[None]:
        with ExitStack() as stack:
            for name in cls.ops:
                stack.enter_context(operator_replaced(operator_named(name), cls.wrong))
            yield


def whole(x: Any) -> Any:
    """The same DTensor on all ranks; other values as they are."""
    if not isinstance(x, DTensor):
        return x
    return x.redistribute(placements=[Replicate()] * x.device_mesh.ndim)


def of_whole_tensors(right: Any, *args: Any, **kwargs: Any) -> Any:
    return right(*map(whole, args), **kwargs)


def along_counted_dimension(right: Any, x: Any, dim: int, **kwargs: Any) -> Any:
    return right(x, dim % x.ndim, **kwargs)


def no_sum_filled(right: Any, x: Any, value: Any) -> Any:
    if any(isinstance(p, Partial) for p in x.placements):
        raise RuntimeError("a sum that is pending cannot be filled")
    return right(x, value)


def no_cut_piece(right: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    if any(isinstance(p, Shard) for p in x.placements):
        raise RuntimeError("a piece of a sharded tensor is no view of it")
    return right(x, *args, **kwargs)


def part_of_a_draw(right: Any, x: Any, args: Any, kwargs: Any) -> Any:
    """This rank's part of random numbers for the whole tensor, which all ranks draw."""
    local = x._local_tensor
    drawn = right(local.new_zeros(x.shape), *args, **kwargs)
    mesh = x.device_mesh
    return part_of(drawn, x.placements, mesh.mesh.shape, mesh.get_coordinate())


def drawn_in_place(right: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    x._local_tensor.copy_(part_of_a_draw(right, x, args, kwargs))
    return x


def drawn_alike(right: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    new = x.clone()
    new._local_tensor.copy_(part_of_a_draw(right, x, args, kwargs))
    return new


def made_uniform(_: Any, *size: int, **how: Any) -> Any:
    return dt.zeros(*size, **how).uniform_()


def made_normal(_: Any, *size: int, **how: Any) -> Any:
    return dt.zeros(*size, **how).normal_()


MENDED: dict[Callable[..., Any], tuple[str, ...]] = {
    of_whole_tensors: (
        *("mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "convolution"),
        "_local_scalar_dense",
    ),
    along_counted_dimension: ("cumsum", "cumprod", "logcumsumexp"),
    no_sum_filled: ("fill_.Scalar",),
    drawn_in_place: ("uniform_", "normal_"),
    drawn_alike: ("rand_like",),
    no_cut_piece: ("select.int", "slice.Tensor", "split.Tensor", "diagonal"),
}


@contextmanager
def repaired() -> Iterator[None]:
    """DTensors that keep the rules that torch's break."""
    with ExitStack() as stack:
        for mended, names in MENDED.items():
            for name in names:
                stack.enter_context(operator_replaced(operator_named(name), mended))
        stack.enter_context(methods_replaced("torch.linalg", {"vector_norm": of_whole_tensors}))
        made = {"rand": made_uniform, "randn": made_normal}
        stack.enter_context(methods_replaced(FRONT, made))
        yield


class Repaired(Patch):
    """No mutant, but a target that keeps all rules of DTensors."""

    patched = staticmethod(repaired)

"""Lists of tensors for coalesced operations, their sums, and how a call is refused."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from conformance.oracle.data import sample
from conformance.oracle.reduction import reduced

SHAPES: list[tuple[int, ...]] = [(3,), (2, 2), (), (5, 1)]
MANY: list[tuple[int, ...]] = [(1 + i % 3, 2) for i in range(40)]


def tensors(rank: int, shapes: list[tuple[int, ...]], dtype: str = "float32") -> list[Tensor]:
    """One tensor for each shape, all different."""
    return [sample(shape, dtype, rank, salt) for salt, shape in enumerate(shapes)]


def each_reduced(
    world_size: int, shapes: list[tuple[int, ...]], op: str = "sum", dtype: str = "float32"
) -> list[Tensor]:
    everyone = [tensors(rank, shapes, dtype) for rank in range(world_size)]
    return [reduced(op, of_one) for of_one in zip(*everyone, strict=True)]


def refused(call: Any, *args: Any, **kwargs: Any) -> str:
    """Which of the usual kinds of errors the call raises, or what it returned."""
    kinds = (ValueError, RuntimeError, TypeError)
    try:
        returned = call(*args, **kwargs)
    except kinds as error:
        return next(kind.__name__ for kind in kinds if isinstance(error, kind))
    return f"returned {returned}"

"""Memory layouts of test tensors: strides and offset in larger memory, which shows stray writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from conformance.oracle.data import blank, name_of


@dataclass(frozen=True, slots=True)
class Layout:
    """A way to lay out a tensor inside of a larger piece of memory.

    before, after: elements in front of the first and behind the last one.
    order: dimensions from the outermost to the innermost in memory; () is the usual order. For
        tensors of another number of dimensions the usual order holds.
    step: distance between neighbours in the innermost dimension; 1 leaves no gaps.
    """

    before: int = 0
    after: int = 0
    order: tuple[int, ...] = ()
    step: int = 1

    def strides(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Stride of each dimension, in elements."""
        order = self.order if len(self.order) == len(shape) else tuple(range(len(shape)))
        strides = [0] * len(shape)
        distance = self.step
        for dimension in reversed(order):
            strides[dimension] = distance
            distance *= max(1, shape[dimension])
        return tuple(strides)


DENSE = Layout()


@dataclass(frozen=True, slots=True)
class Placed:
    """A view and all the memory around it.

    memory: one-dimensional; holds `view`, and `oracle.data.blank` elsewhere.
    """

    memory: Tensor
    view: Tensor


def place(values: Tensor, layout: Layout, device: torch.device | None = None) -> Placed:
    """The values in fresh memory of this layout."""
    shape, strides = values.shape, layout.strides(values.shape)
    span = (
        sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + 1 if values.numel() else 0
    )
    memory = blank((layout.before + span + layout.after,), name_of(values.dtype)).to(device)
    view = memory.as_strided(shape, strides, layout.before)
    view.copy_(values)
    return Placed(memory, view)

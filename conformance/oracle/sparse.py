"""One rank's sparse tensor as plain lists, and the sum of several, computed by dense tensors."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Entries:
    """What one rank contributes: a sparse COO tensor as lists, so that it prints and shrinks well.

    shape: first the sparse dimensions, then the dense ones.
    indices: one tuple an element, of as many numbers as there are sparse dimensions; an index may
        stand there several times.
    values: one whole number an element; an element with dense dimensions holds `values[i]`,
        `values[i] + 1`, ... in turn.
    """

    shape: tuple[int, ...]
    sparse_dim: int
    indices: tuple[tuple[int, ...], ...]
    values: tuple[int, ...]

    def tensor(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The sparse tensor, not coalesced."""
        dense_shape = self.shape[self.sparse_dim :]
        inside = torch.arange(torch.Size(dense_shape).numel()).reshape(dense_shape)
        values = torch.tensor(self.values, dtype=torch.int64).reshape(-1, *[1] * inside.dim())
        indices = torch.tensor(self.indices, dtype=torch.int64).reshape(-1, self.sparse_dim)
        with warnings.catch_warnings():
            # torch 2.11 says that the checks are disabled, also to one who asks for them
            warnings.filterwarnings("ignore", "Sparse invariant checks are implicitly disabled")
            return torch.sparse_coo_tensor(
                indices.t(), (values + inside).to(dtype), self.shape, check_invariants=True
            )


def dense_sum(tensors: Sequence[Tensor]) -> Tensor:
    """The sum as a dense tensor of the inputs' dtype, with wrap-around for integers."""
    wide = torch.float64 if tensors[0].dtype.is_floating_point else torch.int64
    total = torch.stack([x.to(wide).to_dense() for x in tensors]).sum(0)
    return total.to(tensors[0].dtype)

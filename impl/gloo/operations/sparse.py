"""all_reduce of sparse COO tensors: gather every rank's indices and values, then add up.

Each rank adds the contributions in the order of the ranks, so all end with the same bits. The
number of entries may differ between ranks; shape, split into sparse and dense dimensions and dtype
may not.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor

from impl.errors import CollectiveMismatch
from impl.gloo.memory.staging_choice import lender_for
from impl.gloo.queue.issuing import Described
from impl.gloo.requests import validation
from impl.transport.base import CallInfo, Communicator, Deadline

# What Gloo's wire knows of a sparse tensor: four sparse sizes, four dense sizes, entries.
_WIRE_DIMS = 4


class SparseSum:
    """One such operation, from the caller's tensors to the result in them."""

    def __init__(self, tensors: Sequence[Tensor], kind: str) -> None:
        """kind: of the communicator; C++ Gloo's wire asks for more, and carries less."""
        self._tensors = list(tensors)
        self._as_gloo = kind == "gloo"
        local = tensors[0].data
        for more in tensors[1:]:
            local = local + more.data
        self._local = local.coalesce()
        self._sparse_dim, self._dense_dim = local.sparse_dim(), local.dense_dim()
        if self._as_gloo and max(self._sparse_dim, self._dense_dim) > _WIRE_DIMS:
            _refuse_dims(self._sparse_dim, self._dense_dim)
        dtype = validation.plain_dtype(local.dtype)
        shape = ",".join(map(str, local.shape))
        signature = (
            f"op=sum dtype={dtype} layout=sparse_coo shape={shape} "
            f"sparse_dim={self._sparse_dim} dense_dim={self._dense_dim}"
        )
        shown = (
            f"sum {dtype} {tuple(local.shape)} sparse_coo, {self._sparse_dim} sparse and "
            f"{self._dense_dim} dense dimensions"
        )
        self.described = Described(signature, shown)
        self.lender = lender_for([self._local.values()])
        for tensor in tensors:
            self.lender.expect_write(tensor)
        self._indices = self.lender.read(self._local.indices())
        self._values = self.lender.read(self._local.values())
        self.outputs: list[Tensor] = []  # filled by `run`

    def run(self, comm: Communicator, call: CallInfo, until: Deadline) -> None:
        counts = self._gather_counts(comm, call, until)
        indices = [self._indices.new_empty(self._sparse_dim * n) for n in counts]
        comm.all_gather_v(indices, self._indices, call, until)
        # complex values travel as pairs of reals, so the width comes from what was read
        entries = max(self._local._nnz(), 1)
        width = self._values.numel() // entries if self._local._nnz() else self._value_width()
        values = [self._values.new_empty(n * width) for n in counts]
        comm.all_gather_v(values, self._values, call, until)
        result = self._add_up(counts, indices, values)
        self.outputs += [self.lender.give_sparse(result, self._tensors)] * len(self._tensors)

    def _gather_counts(self, comm: Communicator, call: CallInfo, until: Deadline) -> list[int]:
        """Entries of each rank."""
        metadata = self._metadata()
        rows = metadata.new_empty(comm.world_size, metadata.numel())
        comm.all_gather(rows.view(-1), metadata, call, until)
        if not torch.equal(rows[:, :-1], metadata[:-1].expand_as(rows[:, :-1])):
            raise CollectiveMismatch(
                f"Sparse dimensions do not match: {call.operation} #{call.sequence}, rank "
                f"{comm.rank} of {comm.world_size}: by rank, four sparse and four dense sizes are "
                f"{rows[:, :-1].tolist()}."
            )
        return [int(count) for count in rows[:, -1]]

    def _metadata(self) -> Tensor:
        """(9,) int64 as Gloo's wire has it, or (1,) where signatures are compared already."""
        count = self._local._nnz()
        if not self._as_gloo:
            return self._indices.new_tensor([count])
        sizes = [0] * (2 * _WIRE_DIMS)
        shape = self._local.shape
        sizes[: self._sparse_dim] = shape[: self._sparse_dim]
        sizes[_WIRE_DIMS : _WIRE_DIMS + self._dense_dim] = shape[self._sparse_dim :]
        return self._indices.new_tensor([*sizes, count])

    def _value_width(self) -> int:
        """Reals in one entry."""
        width = self._local.shape[self._sparse_dim :].numel()
        return width * (2 if self._local.is_complex() else 1)

    def _add_up(
        self, counts: Sequence[int], indices: Sequence[Tensor], values: Sequence[Tensor]
    ) -> Tensor:
        """One rank after the other, as torch's gloo does: the order decides the bits.

        torch cannot add sparse float16 tensors, so those are added in float32 and rounded once.
        """
        contributions = (
            self._contribution(*each) for each in zip(counts, indices, values, strict=True)
        )
        if self._local.dtype is torch.float16:
            contributions = (contribution.float() for contribution in contributions)
        return functools.reduce(torch.add, contributions).coalesce().to(self._local.dtype)

    def _contribution(self, count: int, indices: Tensor, values: Tensor) -> Tensor:
        entry_shape = self._local.shape[self._sparse_dim :]
        if self._local.is_complex():
            values = torch.view_as_complex(values.view(count, *entry_shape, 2))
        else:
            values = values.view(count, *entry_shape)
        # torch.sparse_coo_tensor itself would put it on the program's default device
        made: Tensor = torch.ops.aten._sparse_coo_tensor_unsafe(
            indices.view(self._sparse_dim, count), values, self._local.shape
        )
        return made


def _refuse_dims(sparse_dim: int, dense_dim: int) -> NoReturn:
    validation.refuse(
        "allreduce",
        f"Gloo's wire carries at most {_WIRE_DIMS} sparse and {_WIRE_DIMS} dense dimensions, and "
        f"the tensor has {sparse_dim} and {dense_dim}",
    )

"""Mutants of conformance/spec/sparse/calls.py."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from conformance.power.handles import Done, Relayed
from conformance.verdict import Verdict
from tests.mutants.kit import ForwardingGroup, breaks
from tests.mutants.sparse.kit import OfImpl, ReducesSparsely

Op = dist.ReduceOp


@breaks("sparse/async", says=r"waited in all_reduce", verdict=Verdict.TIMEOUT)
class ReducesAtOnce(ReducesSparsely):
    """The call returns only when the reduction is complete."""

    def reduce_sparse(self, x: Any, opts: Any) -> Any:
        return self.over(x, opts)


@breaks("sparse/several-at-once", says=r"rank 0 is wrong\nat \[\d\]")
class UsesTheIndicesOfTheFirst(ReducesSparsely):
    """The second and later reductions have the indices of the first one."""

    first: torch.Tensor | None = None

    def reduce_sparse(self, x: Any, opts: Any) -> Any:
        if self.first is None:
            self.first = x._indices().clone()
        x.copy_(torch.sparse_coo_tensor(self.first, x._values(), x.shape))
        return self.rightly(x, opts)


@breaks("sparse/subgroup", says=r"rank \d is wrong")
class SubgroupsAddTheResultAgain(ReducesSparsely):
    """In a group that is not the world, the result is added once more."""

    def reduce_sparse(self, x: Any, opts: Any) -> Any:
        work = self.over(x, opts)
        if self.size() < dist.get_world_size():
            x.copy_(x + x)
        return work


@breaks("sparse/result", says=r"is wrong\nat \[0\]")
class ResultIsTheInput(ReducesSparsely):
    """The result of the handle is the input, before the reduction."""

    def reduce_sparse(self, x: Any, opts: Any) -> Any:
        before = x.clone()

        class WithTheInput(Relayed):
            def result(self) -> Any:
                return [before]

        return WithTheInput(self.rightly(x, opts))


@breaks("sparse/gradients", says=r"rank \d is wrong\nat \[1\]")
class ForgetsRepeatedRows(ReducesSparsely):
    """A row that occurs twice in a rank's tensor counts once."""

    def reduce_sparse(self, x: Any, opts: Any) -> Any:
        indices, first = x._indices().unique(dim=1, return_inverse=True)
        values = torch.zeros(indices.shape[1], *x._values().shape[1:])
        values[first] = x._values()
        x.copy_(torch.sparse_coo_tensor(indices, values, x.shape))
        return self.rightly(x, opts)


@breaks("sparse/other-operations", says=r"dtype=float32[\s\S]*rank 0 is wrong")
class AveragesOnlyDenseTensors(ReducesSparsely):
    """The average of sparse tensors of floats is their sum."""

    def reduce_sparse(self, x: Any, opts: Any) -> Any:
        if opts.reduceOp == Op.AVG and x.dtype.is_floating_point:
            opts.reduceOp = Op.SUM
        return self.rightly(x, opts)


@breaks("sparse/shapes-differ", says=r"rank \d  returned")
class IgnoresDifferentShapes(ReducesSparsely):
    """If shapes differ, the tensors stay as they are, and no error is raised."""

    def reduce_sparse(self, x: Any, opts: Any) -> Any:
        work = self.rightly(x, opts)
        try:
            work.wait()
        except RuntimeError:
            return Done()
        return work


@breaks("sparse/other-collectives", says=r"name=broadcast[\s\S]*rank 1 is wrong")
class SparseBroadcastDoesNothing(ForwardingGroup):
    """A broadcast of a sparse tensor returns without sending anything."""

    def broadcast(self, tensors: Any, opts: Any) -> Any:
        return Done() if tensors[0].is_sparse else super().broadcast(tensors, opts)


@breaks("sparse/dtypes-differ", says=r"rank 0  returned")
class AddsInSinglePrecision(OfImpl):
    """All dtypes are reduced as float32."""

    def spoiled(self, x: torch.Tensor) -> torch.Tensor | None:
        return None if x.dtype is torch.float32 else x.float()

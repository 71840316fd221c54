"""Helpers that mutants of several chapters of sparse share."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from impl.gloo import ProcessGroupGloo
from tests.mutants.kit import ForwardingGroup, GroupMutant

Op = dist.ReduceOp


class ReducesSparsely(ForwardingGroup):
    """Hands sparse reductions to `reduce_sparse`, which a mutant overrides."""

    def reduce_sparse(self, x: Any, opts: Any) -> Any:
        raise NotImplementedError

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        [x] = tensors
        return self.reduce_sparse(x, opts) if x.is_sparse else self.rightly(x, opts)

    def rightly(self, x: Any, opts: Any) -> Any:
        return super().allreduce([x], opts)

    def over(self, x: Any, opts: Any) -> Any:
        """The work of a right reduction, which has been waited for."""
        work = self.rightly(x, opts)
        work.wait()
        return work


class OfImpl(GroupMutant, ProcessGroupGloo):
    """impl's group, which reduces what `spoiled` gives in place of a sparse tensor."""

    base = "impl"

    def spoiled(self, x: torch.Tensor) -> torch.Tensor | None:
        """What is reduced instead of x, or None if x is right."""
        raise NotImplementedError

    def restored(self, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """What x becomes, of the sum of what was reduced instead."""
        return y.to(x.dtype)

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        [x] = tensors
        instead = self.spoiled(x) if x.is_sparse else None
        if instead is None:
            return super().allreduce(tensors, opts)
        work = super().allreduce([instead], opts)
        work.wait()
        x.copy_(self.restored(instead, x))
        return work

"""Mutants of conformance/spec/collectives/allocated.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from impl.gloo import ProcessGroupGloo
from tests.mutants.kit import GroupMutant, breaks


@breaks("tensor_alloc/collectives", says=r"is wrong\nat \[\d+\]: \d+ of 270001 elements differ")
class ReducesFromTheBeginningOfAnAllocation(GroupMutant, ProcessGroupGloo):
    """Of a tensor in allocated memory, the offset at which it begins is forgotten."""

    base = "impl"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.allocated: set[int] = set()

    def allocate_tensor(self, *args: Any, **kwargs: Any) -> Tensor:
        tensor = super().allocate_tensor(*args, **kwargs)
        self.allocated.add(tensor.untyped_storage().data_ptr())
        return tensor

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        [x] = tensors
        if x.untyped_storage().data_ptr() in self.allocated:
            x = x.as_strided(x.shape, x.stride(), 0)
        return super().allreduce([x], opts)


@breaks("tensor_alloc/collectives", says=r"rank \d is wrong")
class RanksReadWhatIsOverwritten(GroupMutant, ProcessGroupGloo):
    """A broadcast of allocated memory is done on the root before the others have read."""

    base = "impl"

    def broadcast(self, tensors: Any, opts: Any) -> Any:
        [x] = tensors
        if opts.rootRank != self.rank() or x.storage_offset() == 0:
            return super().broadcast(tensors, opts)
        kept = x.clone()
        x.zero_()  # as its owner may do when the call is done
        work = super().broadcast(tensors, opts)
        work.wait()
        x.copy_(kept)
        return work


@breaks("tensor_alloc/own-memory", says=r"rank 0: tensor \d+ changed when tensor \d+ was written")
class AllocatesTheSameMemoryAgain(GroupMutant, ProcessGroupGloo):
    """All tensors that are allocated lie in one and the same buffer."""

    base = "impl"
    buffer = torch.empty(1 << 20, dtype=torch.uint8)

    def allocate_tensor(self, size: Any, *, dtype: Any = None, device: Any = "cpu") -> Tensor:
        tensor: Tensor = self.buffer[: size * dtype.itemsize].view(dtype)
        return tensor

"""How a unit's collectives allocate their memory and run: the default ways, and users' own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from impl.torch_private import all_gather_single, reduce_scatter_single


class Allocator(Protocol):
    """Where the memory of a collective comes from."""

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor: ...


class AllGather(Allocator, Protocol):
    """Users' own have torch's base class `torch.distributed.fsdp.AllGather`, or its methods."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None: ...


class ReduceScatter(Allocator, Protocol):
    """Users' own have torch's base class `torch.distributed.fsdp.ReduceScatter`, or its methods."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None: ...


class _Allocating:
    """group: one that can give memory in which it works without copies is asked for it."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        backend: Any = None if self._group is None else self._group._get_backend(device)
        if backend is not None and backend.supports_tensor_alloc(device):
            numel = torch.Size(size).numel()
            tensor: Tensor = backend.allocate_tensor(numel, dtype=dtype, device=device)
            return tensor.view(size)
        return torch.empty(size, dtype=dtype, device=device)


class PlainAllGather(_Allocating):
    """The group's all-gather."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        return all_gather_single(output_tensor, input_tensor, group, async_op)


class PlainReduceScatter(_Allocating):
    """The group's reduce-scatter."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        return reduce_scatter_single(output_tensor, input_tensor, group, async_op, op)

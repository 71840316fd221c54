"""The memory of a unit's whole parameters: allocated for a gather, and freed all at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from impl.device import DeviceHandle
from impl.fully_shard.parameter import ShardedParameter

_ALIGNED_BYTES = 64  # as allocators align: kernels add in another order in tensors that are not


class WholeMemory:
    """Gives each parameter its `gathered`: one storage for all of a dtype.

    The tensors on a storage are not views of each other, so that each has a version counter of its
    own: writing to one parameter is no matter of autograd's for another one.
    """

    def __init__(self, device: DeviceHandle, parameters: Sequence[ShardedParameter]) -> None:
        self._device = device
        self._whole: list[Tensor] = []  # (elements of all parameters of a dtype, aligned)
        for dtype in dict.fromkeys(parameter.part_dtype for parameter in parameters):
            alike = [p for p in parameters if p.part_dtype == dtype]
            aligned = _ALIGNED_BYTES // dtype.itemsize
            sizes = [-(-p.whole_numel // aligned) * aligned for p in alike]
            whole = torch.empty(sum(sizes), dtype=dtype, device=device.current_device())
            begin = 0
            for parameter, size in zip(alike, sizes, strict=True):
                place = whole.new_empty(0)
                place.set_(whole.untyped_storage(), begin, (parameter.whole_numel,), (1,))
                parameter.gathered = place
                begin += size
            self._whole.append(whole)

    def allocate(self) -> None:
        for whole in self._whole:
            self._device.alloc_storage(whole, whole.numel())

    def free(self) -> None:
        """If it is not free."""
        for whole in self._whole:
            self._device.free_storage(whole)

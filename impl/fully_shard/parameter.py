"""One parameter, divided among ranks: its shard, and the whole of it while it is needed.

[Note: The tensors of a parameter]
A parameter of size S is divided along one dimension among `count` ranks, as `torch.chunk` does: the
last shards may be smaller, or empty.

    sharded     this rank's shard, a DTensor: what the optimizer and state dicts see
    flat_shard  (numel,): the memory of `sharded`, with zeros behind it, so that the shards of all
                ranks have the same size
    gathered    (count * numel,): the shards of all ranks, one behind the other
    unsharded   S: what the module computes with, an autograd leaf on the memory of `gathered`

`sharded` and `unsharded` take turns as the module's parameter. Autograd and the module's own views
may hold `unsharded` for longer than that, so it is made once, and its *memory* comes and goes: the
storage of `gathered`, which a unit's parameters share (`WholeMemory`), is resized to nothing and
back. All views of it see the new values.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.weak import WeakIdKeyDictionary

from impl.device import DeviceHandle
from impl.fully_shard.layout import Layout, dtensor_of, local_of
from impl.fully_shard.mesh import Division
from impl.torch_dtensor import replace_local

_count = itertools.count()
_ids = WeakIdKeyDictionary()  # of whole parameters that were divided, for those that are tied


class Place(NamedTuple):
    """Where a module has the parameter. A tied parameter has several."""

    module: nn.Module
    name: str


class ShardedParameter:
    """See [Note: The tensors of a parameter].

    Args:
        param: the whole parameter, contiguous, on the device or on the meta device.
        places: where modules have it.
        shard: the dimension along which it is divided.
        offload: whether the shard, its gradient and so the optimizer's state are kept on the host.

    Raises NotImplementedError for what cannot be divided so.
    """

    def __init__(
        self,
        param: nn.Parameter,
        places: list[Place],
        division: Division,
        shard: Shard,
        device: DeviceHandle,
        offload: bool,
        pin: bool,
    ) -> None:
        self.places = places
        self.original_id = _ids.setdefault(param, next(_count))
        self.name = places[0].name  # the full name, once the root is known
        self.division = division
        self._device = device
        self.offload, self._pin = offload, offload and pin
        whole = local_of(param)
        self.size = whole.size()
        self.shard_dim = _checked_dim(whole, shard, division.shard_count)
        self._layout = Layout(param, division, self.shard_dim)
        chunks = whole.chunk(division.shard_count, self.shard_dim)
        self.padded_size = chunks[0].size()  # the first is the largest
        rank = division.shard_rank
        mine = chunks[rank] if rank < len(chunks) else chunks[0].narrow(self.shard_dim, 0, 0)
        self.sharded_size = mine.size()
        self.sharded_stride = mine.contiguous().stride()
        self.flat_shard = self._padded(mine)
        local = self.flat_shard.view(self.padded_size).narrow(
            self.shard_dim, 0, mine.size(self.shard_dim)
        )
        self.sharded = nn.Parameter(self._layout.shard(local), param.requires_grad)
        self.unsharded: nn.Parameter | None = None
        self.gathered: Tensor | None = None
        self._rows: Tensor | None = None  # see `in_rows`
        self._resharded: Tensor | None = None  # (count * numel / ranks after forward,)
        self.accumulated: Tensor | None = None  # gradient of backwards that were not reduced
        self.set_precision(MixedPrecisionPolicy())
        self._register(self.sharded)

    def __repr__(self) -> str:
        return f"ShardedParameter({self.name}, {tuple(self.size)})"

    # The shard

    def _padded(self, local: Tensor) -> Tensor:
        """(numel,): a copy of the shard, with zeros behind it."""
        whole = local.new_zeros(self.padded_size)
        whole.narrow(self.shard_dim, 0, local.size(self.shard_dim)).copy_(local)
        if self.offload and not whole.is_meta:
            whole = self._device.pin(whole.cpu()) if self._pin else whole.cpu()
        return whole.view(-1)

    def adopt_changes(self) -> None:
        """After `module.to(...)`, `load_state_dict(assign=True)` or so: take what is there."""
        place = self.places[0]
        found: Any = getattr(place.module, place.name)
        self.sharded = found
        local: Tensor = found.to_local().detach() if isinstance(found, DTensor) else found.detach()
        same_memory = (
            local.untyped_storage().data_ptr() == self.flat_shard.untyped_storage().data_ptr()
        )
        if local.is_meta or (same_memory and local.numel()):
            return
        self.flat_shard = self._padded(local)
        length = local.size(self.shard_dim)
        padded = self.flat_shard.view(self.padded_size)
        replace_local(found, padded.narrow(self.shard_dim, 0, length))

    # Precision

    def set_precision(self, policy: MixedPrecisionPolicy) -> None:
        """The dtypes of computation and of gradients on their way; None where it is the own one."""
        self.dtype = self.sharded.dtype
        compute, reduce = policy.param_dtype, policy.reduce_dtype
        self.reduce_dtype = None if reduce == compute else reduce
        same = compute == self.dtype or not self.dtype.is_floating_point
        self.compute_dtype = None if same else compute

    # The whole of it

    def to_be_gathered(self) -> Tensor:
        """(numel,): this rank's part of the next all-gather, in the dtype of computation."""
        part = self.flat_shard if self._resharded is None else self._resharded
        if self.offload:
            part = part.to(self._device.current_device(), non_blocking=True)
        return part if self.compute_dtype is None else part.to(self.compute_dtype)

    @property
    def part_numel(self) -> int:
        """Of `to_be_gathered`."""
        return (self.flat_shard if self._resharded is None else self._resharded).numel()

    @property
    def part_dtype(self) -> torch.dtype:
        """Of `to_be_gathered`."""
        return self.compute_dtype or self.dtype

    @property
    def whole_numel(self) -> int:
        """Of `gathered`."""
        return self.division.shard_count * self.flat_shard.numel()

    @property
    def is_in_rows(self) -> bool:
        """Whether the parts of all ranks, one behind the other, are the whole parameter."""
        return self.shard_dim == 0

    def in_rows(self, count: int) -> Tensor:
        """(count, part_numel): the memory of `gathered` as the parts of so many ranks."""
        assert self.gathered is not None, "its memory comes first"
        numel = self.part_numel
        if self._rows is None or self._rows.size() != (count, numel):
            self._rows = self.gathered[: count * numel].view(count, numel)
        return self._rows

    def take_gathered(self, parts: Tensor) -> None:
        """Fill `gathered`. parts: (ranks, numel of each): what all ranks gave."""
        assert self.gathered is not None, "its memory comes first"
        if self.is_in_rows:
            self.in_rows(parts.size(0)).copy_(parts)
        elif self._resharded is not None:
            self.gathered.copy_(parts.reshape(-1)[: self.gathered.numel()])
        else:
            blocks = parts.view(-1, *self.padded_size).unbind()
            torch.cat(blocks, self.shard_dim, out=self.gathered.view(self.size))

    def to_unsharded(self) -> None:
        if self.unsharded is None:
            assert self.gathered is not None
            whole = self.gathered[: self.size.numel()].view(self.size)
            self.unsharded = nn.Parameter(self._layout.whole(whole), self.sharded.requires_grad)
        trains = self.sharded.requires_grad
        if self.unsharded.requires_grad is not trains:
            self.unsharded.requires_grad_(trains)
        self._resharded = None
        self._register(self.unsharded)

    def to_resharded(self, division: Division) -> None:
        """Keep the rows of one of the ranks of `division`, which are fewer, with zeros behind."""
        if self._layout.is_of_two_meshes:
            raise NotImplementedError(
                "Resharding to smaller mesh is not supported for DTensor parameters yet"
            )
        assert self.gathered is not None
        whole = self.gathered[: self.size.numel()].view(self.size)
        chunks = whole.chunk(division.shard_count)
        rank = division.shard_rank
        mine = chunks[rank] if rank < len(chunks) else whole[:0]
        self._resharded = whole.new_zeros(chunks[0].numel())
        local = self._resharded[: mine.numel()].view(mine.size()).copy_(mine)
        placements = (Replicate(), Shard(0))
        self._register(
            nn.Parameter(
                dtensor_of(local, division.mesh, placements, self.size), self.sharded.requires_grad
            )
        )

    def to_sharded(self) -> None:
        self._resharded = None
        self._register(self.sharded)

    def _register(self, param: nn.Parameter) -> None:
        for module, name in self.places:
            if type(module).__setattr__ is nn.Module.__setattr__:
                module._parameters[name] = param  # a fifth of the time of the module's checks
            else:
                setattr(module, name, param)

    # Gradients

    def add_to_accumulated(self) -> None:
        """If a gradient of earlier backwards is kept in another dtype, add the new one to it."""
        grad = None if self.unsharded is None else self.unsharded.grad
        if self.accumulated is not None and grad is not None:
            self.accumulated += grad
            self.unsharded.grad = None  # type: ignore[union-attr]  # it has this gradient

    def keep_for_later(self) -> None:
        """The gradient is not reduced now: keep it in the dtype in which it will be."""
        grad = None if self.unsharded is None else self.unsharded.grad
        if grad is None or self.reduce_dtype in (None, grad.dtype):
            return
        assert self.unsharded is not None
        self.unsharded.grad = None
        self.accumulated = grad.to(self.reduce_dtype)

    def take_gradient(self, zeros_for_none: bool) -> Tensor | None:
        """(size): the gradient of all backwards that were not reduced. It is not kept."""
        grad, self.accumulated = self.accumulated, None
        if self.unsharded is None:
            return None
        if grad is None:
            grad, self.unsharded.grad = self.unsharded.grad, None
        if grad is None and zeros_for_none and self.sharded.requires_grad:
            grad = torch.zeros_like(self.unsharded)
        return None if grad is None else self._layout.local_gradient(grad)

    def forget_gradient(self) -> None:
        """Of the whole parameter: what has not been reduced is lost."""
        self.accumulated = None
        if self.unsharded is not None:
            self.unsharded.grad = None

    def as_shard(self, part: Tensor) -> Tensor:
        """(sharded_size): what a padded part, (numel,), holds of a gradient."""
        if part.size() == self.sharded_size:
            return part
        return part.as_strided(self.sharded_size, self.sharded_stride, part.storage_offset())

    def put_gradient(self, shard: Tensor) -> None:
        """Add a shard of the reduced gradient, (sharded_size), and run the user's hooks."""
        have: Any = self.sharded.grad
        if have is None:
            self.sharded.grad = self._layout.shard(shard)
        else:
            have.to_local().add_(shard)
        hooks: dict[int, Callable[[Tensor], None]] | None = self.sharded._post_accumulate_grad_hooks
        if hooks:
            for hook in list(hooks.values()):
                hook(self.sharded)


def _checked_dim(param: Tensor, shard: Shard, count: int) -> int:
    if hasattr(param, "fsdp_pre_all_gather"):
        raise NotImplementedError(
            f"all-gathers extended by fsdp_pre_all_gather are not supported: {type(param)}"
        )
    if not param.is_contiguous():
        raise NotImplementedError(
            "FSDP does not support non-contiguous parameters yet: "
            f"param.shape={param.shape} param.stride()={param.stride()}"
        )
    dim = shard.dim % param.ndim if -param.ndim <= shard.dim < 0 else shard.dim
    if dim >= param.ndim:
        raise AssertionError(f"Shard dim {dim} is invalid for {param.ndim}D tensor: {param.shape}")
    if dim > 0 and param.size(dim) % count:
        raise NotImplementedError(
            f"FSDP does not support uneven sharding on dim {dim}: {param.size()} "
            f"(world size: {count})"
        )
    return dim

"""`FlatParamHandle`: allocates, unshards and reshards one flat parameter, in both precisions.

[Note: Tensors of a handle]
With a sharded strategy:

| tensor                | shape                     | dtype       | allocated             |
|-----------------------|---------------------------|-------------|-----------------------|
| `local_shard`         | (chunk_numel,)            | original    | always                |
| `low_precision_shard` | (chunk_numel,)            | computation | while it is gathered  |
| `unsharded`           | (world_size*chunk_numel,) | computation | from gather to free   |
| `unsharded_full_prec` | (world_size*chunk_numel,) | original    | the same, if summoned |

`low_precision_shard` and `unsharded_full_prec` exist only with a `param_dtype` of mixed precision.
The flat parameter itself is one autograd leaf whose `.data` points to one of these: to
`local_shard` while sharded, to the front of `unsharded` otherwise. Storages are resized to 0, not
replaced, so views that autograd saved in the forward find their data again after the gather of the
backward.

With `NO_SHARD` the flat parameter is always whole: `local_shard` has all elements, and
`low_precision_shard`, if there is one, is what the computation uses.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from impl.device import DeviceHandle, storage_numel
from impl.fsdp import collectives
from impl.fsdp.common import (
    ENV_FULL_PRECISION_IN_EVAL,
    ENV_SKIP_WRITEBACK_CHECK,
    ENV_UNSAFE_SETATTR,
    check,
    set_flattened,
)
from impl.fsdp.flat_param.config import Dtypes, HandleConfig
from impl.fsdp.flat_param.layout import ShardLayout, alignment_numel, plan_shard, plan_unsharded
from impl.fsdp.flat_param.optimizer_steps import optimizer_steps
from impl.fsdp.flat_param.packing import (
    ParamTransform,
    describe_params,
    make_flat_parameter,
    validate_params,
)
from impl.fsdp.flat_param.views import AttributeViews, OrigParamViews
from impl.fsdp.phases import (
    OUTSIDE_COMPUTATION,
    DataEvent,
    DataPhase,
    DataProgress,
    GradientProgress,
    UnitPhase,
    UnitProgress,
)

NO_UNIT = -1


class FlatParamHandle:
    """One flat parameter and everything that happens to its data. Gradients: `gradients.py`.

    Args:
        params: the parameters to flatten; every one must be in `module`.
        module: the module whose forward needs them.
        group: the ranks that share the flat parameter.

    Raises:
        ValueError: if `params` cannot share a flat parameter (see `validate_params`).
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        module: nn.Module,
        group: dist.ProcessGroup,
        device_handle: DeviceHandle,
        config: HandleConfig,
        transform: ParamTransform,
    ) -> None:
        self.module = module
        self.process_group = group
        self.rank = group.rank()
        self.world_size = group.size()
        self.config = config
        self.device = config.device
        self.device_handle = device_handle
        self.progress = UnitProgress()
        self.data_progress = DataProgress()
        self.gradient_progress = GradientProgress()
        self.skips_writeback_check = os.environ.get(ENV_SKIP_WRITEBACK_CHECK, "") == "1"
        self.uses_full_precision_in_eval = os.environ.get(ENV_FULL_PRECISION_IN_EVAL, "") == "1"
        # Position among the units of the root; lazy initialisation sets it.
        self.unit = NO_UNIT
        # What `flat_param.grad` was before, to tell whether something was added to it.
        self.grad_before_backward: tuple[int, int] | None = None
        # The gradient accumulator of the flat parameter, kept alive, and the hook on it; or, for a
        # frozen parameter, only the hook on the inputs.
        self.post_backward_hook: tuple[Any, ...] | None = None
        self.has_optimizer_in_backward = False

        params = list(params)
        # The first parameter's dtype stands for all; validation comes after the transform, which
        # may change what is flattened.
        self.dtypes = Dtypes.of(params[0].dtype, config.mixed_precision)
        collected = describe_params(
            module,
            params,
            alignment=(
                alignment_numel(self.dtypes.compute.itemsize) if config.use_orig_params else 0
            ),
            world_size=self.world_size,
            transform=transform,
        )
        validate_params(collected.tensors, use_orig_params=config.use_orig_params)
        self.metadata = collected.metadata
        self.layout = collected.metadata.layout
        self.views: AttributeViews
        self.orig_views: OrigParamViews | None = None
        past_setattr = os.environ.get(ENV_UNSAFE_SETATTR, "") == "1"
        if config.use_orig_params:
            self.views = self.orig_views = OrigParamViews(collected, past_setattr=past_setattr)
            taken: Sequence[Tensor] = self.orig_views.all_params()
        else:
            self.views = AttributeViews(collected.metadata, past_setattr=past_setattr)
            taken = collected.tensors
        for param in taken:
            set_flattened(param)  # a parent FSDP instance must not flatten them again
        self.flat_param = make_flat_parameter(
            self.metadata.flatten(collected.tensors),
            requires_grad=any(tensor.requires_grad for tensor in collected.tensors),
        )
        self.flat_param._fqns = self.metadata.fqns  # type: ignore[attr-defined]  # torch's name
        set_flattened(self.flat_param)
        self.shard_layout: ShardLayout
        self._create_tensors()
        with torch.enable_grad():
            self.views.show_tensors(self.flat_param)
        self._shard()

    def __repr__(self) -> str:
        return (
            f"FlatParamHandle({self.config.strategy.name}, rank {self.rank} of {self.world_size}, "
            f"{self.phase.name}, {self.data_progress.phase.name.lower()}, "
            f"params {list(self.metadata.fqns)})"
        )

    # Construction

    def _create_tensors(self) -> None:
        """Declare the tensors that `init_tensors` fills in (see [Note: Tensors of a handle])."""
        self.local_shard: Tensor = self.flat_param.data
        self.low_precision_shard: Tensor | None = None
        self.unsharded: Tensor | None = None
        self.unsharded_full_prec: Tensor | None = None
        self.cpu_grad: Tensor | None = None  # (chunk_numel,), pinned; only with offloading
        # (chunk_numel,): the reduced gradient of this iteration, until the backward pass ends
        self.saved_grad_shard: Tensor | None = None
        # What the attributes were views into when a forward left them unsharded.
        self.unsharded_shown: Tensor | None = None
        # Whether the shards were written after they were gathered last. No phase implies it: an
        # optimizer may step at any time.
        self.is_outdated = False

    @torch.no_grad()
    def _shard(self) -> None:
        """Replace the unsharded flat parameter by this rank's shard and free the former."""
        if not self.config.uses_sharding:
            self.shard_layout = plan_unsharded(self.layout)
        else:
            self.shard_layout = plan_shard(self.layout, self.rank, self.world_size)
            whole = self.flat_param.data
            shard = collectives.new_input(
                whole, self.shard_layout.numel, self.process_group
            ).zero_()
            start, used = self.shard_layout.start, self.shard_layout.unpadded_numel
            shard[:used].copy_(whole[start : start + used])
            self.device_handle.free_storage(whole)
            self.flat_param.data = shard
        self.local_shard = self.flat_param.data
        if self.orig_views is not None:
            self._show_sharded()

    @torch.no_grad()
    def init_tensors(self) -> None:
        """Set up for computation, at the first forward, when device and dtype are final.

        Raises:
            AssertionError: if the flat parameter is not where it should be.
        """
        flat_param, numel = self.flat_param, self.shard_layout.numel
        if flat_param.dtype != self.dtypes.original:  # the user called `.to(dtype)`
            self.dtypes = Dtypes.of(flat_param.dtype, self.config.mixed_precision)
        if self.config.offload_params:
            check(
                flat_param.device.type == "cpu",
                "Expects the `FlatParameter` to be on CPU when parameter CPU offloading is "
                f"enabled, not {flat_param.device}",
            )
        else:
            self.check_on_compute_device(flat_param)
        self.local_shard = flat_param.data
        if self.config.offload_params:
            self.local_shard = self.device_handle.pin(self.local_shard)
            self.cpu_grad_buffer()
        if self.uses_low_precision_params:
            self.low_precision_shard = self._empty_freed(numel, self.dtypes.compute)
        if self.config.uses_sharding:
            padded_numel = numel * self.world_size
            self.unsharded = self._empty_freed(padded_numel, self.dtypes.compute)
            if self.uses_low_precision_params:
                self.unsharded_full_prec = self._empty_freed(padded_numel, self.dtypes.original)

    def cpu_grad_buffer(self) -> Tensor:
        """`cpu_grad`, allocated if an optimizer in the backward pass has used it up."""
        if self.cpu_grad is None:
            self.cpu_grad = self.device_handle.pin(torch.zeros_like(self.local_shard))
        return self.cpu_grad

    def _empty_freed(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A tensor (numel,) on the compute device whose storage is not allocated."""
        tensor = torch.empty(numel, dtype=dtype, device=self.device)
        self.device_handle.free_storage(tensor)
        return tensor

    # Predicates

    @property
    def phase(self) -> UnitPhase:
        return self.progress.phase

    @property
    def points_to_unsharded(self) -> bool:
        """Whether the flat parameter is the unsharded one at the moment."""
        return self.data_progress.phase is not DataPhase.SHARDED

    @property
    def is_prefetched(self) -> bool:
        return self.data_progress.phase is DataPhase.PREFETCHED

    @property
    def uses_low_precision_params(self) -> bool:
        return self.dtypes.compute != self.dtypes.original

    @property
    def forces_full_precision(self) -> bool:
        """Whether mixed precision is suspended: outside computation; in eval if so configured."""
        return self.forces_full_precision_in(self.phase)

    def forces_full_precision_in(self, phase: UnitPhase) -> bool:
        return (self.uses_low_precision_params or self.dtypes.reduce != self.dtypes.original) and (
            phase in OUTSIDE_COMPUTATION
            or (self.uses_full_precision_in_eval and not self.module.training)
        )

    @property
    def unsharded_buffer(self) -> Tensor:
        """The tensor that a gather would fill at this moment."""
        return self.unsharded_buffer_in(self.phase)

    def unsharded_buffer_in(self, phase: UnitPhase) -> Tensor:
        check(self.config.uses_sharding, "Expects sharded strategy")
        full_precision = self.forces_full_precision_in(phase) and self.uses_low_precision_params
        buffer = self.unsharded_full_prec if full_precision else self.unsharded
        assert buffer is not None, "init_tensors has not run"
        return buffer

    @property
    def holds_unsharded(self) -> bool:
        """Whether the unsharded parameter is in memory (always, with `NO_SHARD`)."""
        return self.holds_unsharded_in(self.phase)

    def holds_unsharded_in(self, phase: UnitPhase) -> bool:
        if not self.config.uses_sharding:
            return True
        return self.unsharded is not None and storage_numel(self.unsharded_buffer_in(phase)) > 0

    def needs_unshard(self, phase: UnitPhase) -> bool:
        """Whether an unshard for `phase` has to gather, which every rank answers alike.

        An unsharded parameter may have outlived its forward (the root's, or any with
        `SHARD_GRAD_OP`). It is not used for what is summoned: the shards may have been written
        since. Nor for another forward after an optimizer step. (torch 2.13 uses it both times, and
        `summon_full_params` then overwrites the step.) Between a forward and its backward the old
        values are the right ones.
        """
        if not self.config.uses_sharding:
            return False
        return (
            not self.holds_unsharded_in(phase)
            or phase in OUTSIDE_COMPUTATION
            or (phase is UnitPhase.FORWARD and self.is_outdated)
        )

    @property
    def skipped_sharded_views(self) -> bool:
        """Whether the last forward left unsharded attributes in place, as nothing was freed."""
        return self.unsharded_shown is not None

    def has_shard_shape(self, tensor: Tensor) -> bool:
        """Whether `tensor` has the sharded size (never, with `NO_SHARD`)."""
        return self.config.uses_sharding and tensor.shape == (self.shard_layout.numel,)

    # Unshard

    def use_low_precision_shard(self) -> None:
        """Allocate the low precision shard, cast into it and let the flat parameter be it."""
        low, shard, device = self.low_precision_shard, self.local_shard, self.device_handle
        assert low is not None
        device.alloc_storage(low, low.numel())
        device.enqueue(lambda: low.copy_(shard, non_blocking=True), reads=(shard,), writes=(low,))
        self.flat_param.data = low

    def move_shard_to_compute_device(self) -> None:
        """Copy an offloaded shard to the device for communication."""
        shard = self.local_shard
        moved = torch.empty_like(shard, device=self.device)
        self.device_handle.enqueue(
            lambda: moved.copy_(shard, non_blocking=True), reads=(shard,), writes=(moved,)
        )
        self.flat_param.data = moved

    def pre_unshard(self, phase: UnitPhase) -> bool:
        """Make the flat parameter what is to be gathered for `phase`, in the right dtype and place.

        Returns whether the device has work to do for that.
        """
        # Without sharding this is what computes; offloaded, the shard must leave the host even if
        # nothing is gathered; otherwise only a gather needs it.
        if not self.config.uses_sharding or self.config.offload_params or self.needs_unshard(phase):
            if self.uses_low_precision_params and not self.forces_full_precision_in(phase):
                self.use_low_precision_shard()
                return True
            if self.config.offload_params and not self.device_handle.holds(self.flat_param):
                self.move_shard_to_compute_device()
                return True
        self.check_on_compute_device(self.flat_param)
        return False

    def unshard(self, phase: UnitPhase) -> None:
        """Gather if needed, then let the flat parameter and the attributes be the unsharded one.

        phase: what it is gathered for, which may be still to come.
        """
        if not self.config.uses_sharding:
            self._use_unsharded(self.flat_param.data, phase)
            return
        buffer = self.unsharded_buffer_in(phase)
        if self.needs_unshard(phase):
            self._free_unsharded_buffers()
            shard = self.flat_param.data
            self.device_handle.alloc_storage(buffer, buffer.numel())
            collectives.all_gather(self.device_handle, buffer, shard, self.process_group)
            if self.config.offload_params:
                # Allocated on the pre-unshard stream, read on this one.
                self.device_handle.record_stream(shard, self.device_handle.current_stream())
            self.is_outdated = False
        self._use_unsharded(buffer, phase)

    def post_unshard(self) -> None:
        if self.config.uses_sharding:
            self._free_low_precision_shard()

    def _use_unsharded(self, padded: Tensor, phase: UnitPhase) -> None:
        self.flat_param.data = padded[: self.layout.numel]
        self.data_progress.on(DataEvent.UNSHARDED)
        in_forward = phase is UnitPhase.FORWARD
        in_pre_backward = phase is UnitPhase.BACKWARD_PRE
        if self.orig_views is None:
            if in_forward:
                with torch.enable_grad():  # also when prefetching from a no-grad forward
                    self.views.show_tensors(self.flat_param)
        elif in_forward:
            with torch.enable_grad():
                self.orig_views.show_forward_tensors(self.flat_param)
        elif not in_pre_backward:
            self.show_unsharded_params()
        elif not self.skipped_sharded_views:
            with torch.enable_grad():
                self.orig_views.show_backward_tensors(self.flat_param)

    # Reshard

    def reshard(self, *, free: bool) -> None:
        """Let the flat parameter be the shard again; `free` also frees the unsharded one."""
        device = self.device_handle
        if self.config.offload_params and not self.config.uses_sharding:
            # A copy, allocated on the pre-unshard stream and read on this one.
            device.record_stream(self.flat_param, device.current_stream())
        # In this order: nothing the user can reach may point to freed memory, not for a moment.
        self._use_sharded()
        if free:
            self._free_unsharded_buffer(self.unsharded_buffer)
            optimizer_steps.forget(self)
        elif self.config.uses_sharding:
            optimizer_steps.watch(self)

    def post_reshard(self) -> None:
        """With `NO_SHARD` the low precision "shard" was what computation used; free it now."""
        if not self.config.uses_sharding and not self.forces_full_precision:
            self._free_low_precision_shard()

    def _use_sharded(self) -> None:
        unsharded = self.flat_param.data
        self.flat_param.data = self.local_shard
        self.data_progress.on(DataEvent.RESHARDED)
        if self.orig_views is None:
            return
        in_forward = self.phase is UnitPhase.FORWARD
        if in_forward and self.config.keeps_after_forward and torch.is_grad_enabled():
            # Nothing is freed and the backward needs the attributes: leave them.
            self.unsharded_shown = unsharded
        else:
            self._show_sharded()

    def _show_sharded(self) -> None:
        assert self.orig_views is not None
        self.unsharded_shown = None
        if not self.config.uses_sharding:
            self.show_unsharded_params()
            return
        self.orig_views.show_sharded_params(self.flat_param.data, self.shard_layout)
        if self.phase is UnitPhase.BACKWARD_POST:
            self.orig_views.forget_forward_tensors()

    def _free_unsharded_buffer(self, buffer: Tensor) -> None:
        # The storage may be reused only when the work enqueued so far has read it.
        self.device_handle.record_stream(buffer, self.device_handle.current_stream())
        self.device_handle.free_storage(buffer)

    def _free_unsharded_buffers(self) -> None:
        """Free the unsharded parameter in either precision.

        Only one of the two may exist: what is written to one makes the other outdated.
        """
        for buffer in (self.unsharded, self.unsharded_full_prec):
            if buffer is not None and storage_numel(buffer) > 0:
                self._free_unsharded_buffer(buffer)

    def _free_low_precision_shard(self) -> None:
        """Free it as soon as what is enqueued on the current stream has read it."""
        low, device = self.low_precision_shard, self.device_handle
        if low is None or storage_numel(low) == 0:
            return
        device.record_stream(low, device.current_stream())
        device.enqueue(lambda: device.free_storage(low), writes=(low,))

    # For work outside computation

    def show_sharded_params(self) -> None:
        self._show_sharded()

    def show_unsharded_params(self) -> None:
        assert self.orig_views is not None
        self.orig_views.show_unsharded_params(
            self.flat_param.data, requires_grad=self.flat_param.requires_grad
        )

    def follow_flat_param(self) -> None:
        """Adopt data that `Module.to()` and the like gave to the sharded flat parameter."""
        data = self.flat_param.data
        if self.points_to_unsharded or data.untyped_storage().data_ptr() == (
            self.local_shard.untyped_storage().data_ptr()
        ):
            return
        if self.unit != NO_UNIT:  # initialised before
            self.init_tensors()
        else:
            self.local_shard = data

    def mark_outdated(self) -> None:
        """Have the next forward gather again, although the unsharded parameter is in memory."""
        self.is_outdated = True

    def note_step(self, stepped: set[int]) -> None:
        """An optimizer has stepped that has the parameters with the `id`s `stepped`."""
        params = [] if self.orig_views is None else self.orig_views.params
        if any(id(param) in stepped for param in (self.flat_param, *params)):
            self.mark_outdated()

    def move_unsharded_to_cpu(self) -> None:
        """Put the unsharded flat parameter on CPU and free it on the device."""
        self.set_data(self.flat_param.data.to("cpu", copy=True))
        self._free_unsharded_buffer(self.unsharded_buffer)

    def move_unsharded_back(self) -> None:
        """Undo `move_unsharded_to_cpu`, with what has been written since."""
        buffer = self.unsharded_buffer
        self.device_handle.alloc_storage(buffer, buffer.numel())
        buffer[: self.layout.numel].copy_(self.flat_param.data)
        self._use_unsharded(buffer, self.phase)

    def set_data(self, data: Tensor) -> None:
        """Replace the flat parameter's data and refresh what the attributes show."""
        self.flat_param.data = data
        if self.orig_views is not None:
            if self.has_shard_shape(data):
                self._show_sharded()
            else:
                self.show_unsharded_params()

    @torch.no_grad()
    def write_back_shard(self) -> None:
        """Copy this rank's chunk of the unsharded flat parameter into the local shard."""
        self.local_chunk(self.local_shard).copy_(self.own_part(self.flat_param.data))

    def own_part(self, unsharded: Tensor) -> Tensor:
        """The elements of `unsharded`, (layout.numel,), that this rank holds, without padding."""
        start = self.shard_layout.start
        return unsharded[start : start + self.shard_layout.unpadded_numel]

    def local_chunk(self, shard: Tensor) -> Tensor:
        """The elements of `shard`, (chunk_numel,), that are no padding."""
        return shard[: self.shard_layout.unpadded_numel]

    # Checks

    def check_on_compute_device(self, tensor: Tensor) -> None:
        if tensor.device != self.device:
            self._refuse(
                f"Expects tensor to be on the compute device {self.device}, was on {tensor.device}"
            )

    def check_sharded_size(self, tensor: Tensor) -> None:
        size = torch.Size([self.shard_layout.numel])
        if tensor.size() != size:
            self._refuse(f"Expects tensor to be sharded with size {size} but got {tensor.size()}")

    def check_unsharded_size(self, tensor: Tensor) -> None:
        size = torch.Size([self.layout.numel])
        if tensor.size() != size:
            self._refuse(f"Expects tensor to be unsharded with size {size} but got {tensor.size()}")

    def _refuse(self, reason: str) -> NoReturn:
        raise AssertionError(f"{reason}: {self}")

"""Full parameters outside of a step (`summon_full_params`), and exposing the flat parameter."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from impl.fsdp.common import FLAT_PARAM, TrainingState, check
from impl.fsdp.flat_param import gradients
from impl.fsdp.flat_param.handle import FlatParamHandle
from impl.fsdp.flat_param.writeback import adopt_replaced_params
from impl.fsdp.phases import OUTSIDE_COMPUTATION, UnitEvent, UnitPhase
from impl.fsdp.step.backward import ensure_ready
from impl.fsdp.step.sharding import reshard, settle, unshard
from impl.fsdp.step.state import FSDPState, state_of, states_in


@dataclass(frozen=True)
class SummonOptions:
    """What `summon_full_params` was asked for; see there."""

    writeback: bool
    rank0_only: bool = False
    offload_to_cpu: bool = False
    with_grads: bool = False

    def validate(self, state: FSDPState) -> None:
        """Raise NotImplementedError for meaningless combinations, or those that torch rejects."""
        if self.with_grads and (self.offload_to_cpu or not state.use_orig_params):
            raise NotImplementedError(
                f"with_grads={self.with_grads}, use_orig_params={state.use_orig_params}, "
                f"offload_to_cpu={self.offload_to_cpu} is not supported yet"
            )
        if self.offload_to_cpu and state.handle and not state.handle.config.uses_sharding:
            raise NotImplementedError("offload_to_cpu=True and NO_SHARD is not supported yet")
        if self.writeback and self.rank0_only:
            raise NotImplementedError("writeback=True and rank0_only=True is not supported yet")
        if self.offload_to_cpu and not self.rank0_only:
            warnings.warn(
                "offload_to_cpu=True and rank0_only=False may result in the"
                "unsharded parameters being redundantly copied to CPU memory for GPUs sharing the "
                "same CPU memory, which risks CPU OOM. We recommend using offload_to_cpu=True with "
                "rank0_only=True.",
                stacklevel=6,
            )


@contextlib.contextmanager
def summon(module: nn.Module, *, recurse: bool, options: SummonOptions) -> Iterator[None]:
    """Unshard the instances in `module`, or with `recurse=False` only `module` itself."""
    if recurse:
        states = states_in(module)
    else:
        own = state_of(module)
        states = [own] if own is not None else []
    with contextlib.ExitStack() as stack:
        for state in states:
            stack.enter_context(summon_one(state, options))
        yield


@contextlib.contextmanager
def summon_one(state: FSDPState, options: SummonOptions) -> Iterator[None]:
    """Unshard one instance for the user."""
    options.validate(state)
    ensure_ready(state)
    if state.training_state == TrainingState.FORWARD_BACKWARD:
        raise AssertionError("Cannot manually unshard parameters during forward/backward")
    if state.training_state == TrainingState.SUMMON_FULL_PARAMS:
        raise AssertionError(
            "Cannot manually unshard parameters when already unsharding parameters"
        )
    with unsharded(state, options):
        state.progress.on(UnitEvent.SUMMONED if options.writeback else UnitEvent.SUMMONED_READ_ONLY)
        try:
            yield
        finally:
            # A unit with parameters is restored by `unsharded`.
            state.progress.on(UnitEvent.RELEASED if state.handle else UnitEvent.RESTORED)


@contextlib.contextmanager
def unsharded(state: FSDPState, options: SummonOptions) -> Iterator[None]:
    """Unshard the parameters of one instance and show them as parameters.

    What is sharded is gathered here and freed afterwards, whatever was in memory before: the shards
    count, and changes to the gathered copy do not survive unless they are written back. If a
    backward is still to come, it gathers again.
    """
    handle = state.handle
    settle(state)
    if handle is None or handle.phase in OUTSIDE_COMPUTATION:
        yield
        return
    check(
        handle.phase is UnitPhase.IDLE,
        f"Expects the handle training to be IDLE but got {handle.phase}",
    )
    handle.progress.on(UnitEvent.EXPOSED)
    gradients.reset_if_cleared([handle])
    # On the compute stream, where the user is going to work.
    compute = state.device_handle.current_stream()
    unshard(state, handle, compute, compute)
    grad_shard = gradients.unshard_grad(handle) if options.with_grads else None

    def restore() -> None:
        reshard(state, handle, free=handle.config.uses_sharding)
        if options.with_grads:
            gradients.reshard_grad(handle, grad_shard)

    def write_back() -> None:
        handle.write_back_shard()
        if options.with_grads:
            gradients.write_back_grad(handle, grad_shard)

    with contextlib.ExitStack() as stack:  # undone in the reverse order
        stack.callback(handle.progress.on, UnitEvent.RESTORED)
        if options.rank0_only and state.rank != 0:
            restore()  # at once: the gather needed this rank, the user does not
            yield
            return
        stack.callback(restore)
        if options.writeback:
            stack.callback(write_back)
        if options.offload_to_cpu and handle.config.uses_sharding:
            stack.enter_context(_on_cpu(handle))
        if not state.use_orig_params:
            stack.enter_context(_as_params(state, handle))
        if options.writeback:
            stack.callback(adopt_replaced_params, handle)
        yield


@contextlib.contextmanager
def _on_cpu(handle: FlatParamHandle) -> Iterator[None]:
    """Keep the unsharded flat parameter on CPU inside the context, and only there."""
    handle.check_unsharded_size(handle.flat_param)
    handle.move_unsharded_to_cpu()
    try:
        yield
    finally:
        handle.move_unsharded_back()


@contextlib.contextmanager
def _as_params(state: FSDPState, handle: FlatParamHandle) -> Iterator[None]:
    """Show original parameters instead of the flat parameter (no orig params)."""
    deregister_flat_param(state)
    handle.views.show_fresh_params(
        handle.flat_param.data, requires_grad=handle.flat_param.requires_grad
    )
    try:
        yield
    finally:
        with torch.enable_grad():
            handle.views.show_tensors(handle.flat_param)
        register_flat_param(state)


# The flat parameter as a parameter of the wrapped module


def register_flat_param(state: FSDPState) -> None:
    """Let `parameters()` yield the flat parameter.

    Not through `register_parameter`: the name must stay an attribute while it is hidden.
    """
    if state.handle is not None:
        state.innermost_module._parameters[FLAT_PARAM] = state.handle.flat_param


def deregister_flat_param(state: FSDPState) -> None:
    if state.handle is not None:
        state.innermost_module._parameters.pop(FLAT_PARAM, None)


def follow_flat_param(state: FSDPState) -> None:
    """Adopt what `Module.to()` and the like did to the registered flat parameter.

    Raises:
        RuntimeError: if they made another kind of tensor of it (one on the meta device, say).
    """
    handle = state.handle
    if handle is None:
        return
    registered = state.innermost_module._parameters.get(FLAT_PARAM)
    if registered is not None and registered is not handle.flat_param:
        # The optimizer and the gradient accumulator know the old variable.
        handle.flat_param.data = registered.data
        register_flat_param(state)
    handle.follow_flat_param()


@contextlib.contextmanager
def flat_param_exposed(state: FSDPState) -> Iterator[None]:
    """Show the flat parameter of one instance instead of the original ones, if those are shown."""
    handle = state.handle
    if handle is None or handle.orig_views is None:
        yield
        return
    handle.views.hide()
    register_flat_param(state)
    try:
        yield
    finally:
        deregister_flat_param(state)
        if handle.points_to_unsharded:
            handle.show_unsharded_params()
        else:
            handle.show_sharded_params()
            gradients.show_grads(handle)


@contextlib.contextmanager
def flat_params_exposed(state: FSDPState) -> Iterator[None]:
    """The same for all instances below `state`.

    For `Module._apply`, which underlies `to()` and `cuda()`: the flat parameters own the storage.
    """
    with contextlib.ExitStack() as stack:
        for other in states_in(state.wrapper):
            stack.enter_context(flat_param_exposed(other))
        yield

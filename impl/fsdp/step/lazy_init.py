"""Lazy initialisation at first use: decides the root, checks settings, makes streams and tensors.

Only then is it known which instance is the root, and only then have parameters their final device
and dtype. The root initialises all instances below it; on those, laziness is a no-op.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from impl.added_parameters import warn_of_added_parameters
from impl.fsdp.common import TrainingState, check, clean_tensor_name
from impl.fsdp.step import buffers
from impl.fsdp.step.state import (
    FSDPState,
    RootContext,
    StepStreams,
    state_of,
    states_in,
)

# Settings that must be the same on all instances under one root. Process groups may differ: hybrid
# sharding and mixtures of experts need that.
HOMOGENEOUS_SETTINGS = {
    "_use_orig_params": "use_orig_params",
    "limit_all_gathers": "limit_all_gathers",
    "_use_full_prec_in_eval": "uses_full_precision_in_eval",
}


def lazy_init(state: FSDPState) -> None:
    """Initialise the tree below `state` with `state` as its root, unless it is initialised.

    All checks come first: after an error nothing has changed.

    Raises:
        RuntimeError: for parameters on a wrong device, or an unusable one.
        ValueError: for settings that are not homogeneous.
        AssertionError: if an instance below is the root of another tree.
    """
    if state.is_root is not None:
        return
    if not state.device_handle.is_available():
        raise RuntimeError(
            f"FSDP cannot run on {state.compute_device}: the device is not available"
        )
    state.require(TrainingState.IDLE)
    states = states_in(state.wrapper)
    _check_devices(state, states)
    _check_homogeneous(states)
    for other in states:
        check(
            other is state or not other.is_root,
            "Non-root FSDP instance's `_is_root` should not have been set yet or should have been "
            "set to `False`",
        )
        _note_optimizer_in_backward(other)
    _warn_of_added_parameters(state.wrapper, states)
    context = RootContext(state, states, _make_streams(state, states))
    # What is made here outlives a first forward in inference mode, and training could not use it.
    # (torch 2.13 raises at the first forward after that.)
    with torch.inference_mode(mode=False), torch.no_grad():
        buffers.cast_and_move(buffers.computation_dtypes(states), state.compute_device)
        for other in states:
            if other.handle is not None:
                other.handle.init_tensors()
    context.param_names = _names_of_units(context)
    for other in states:
        other.is_root = other is state
        other.context = context


def reset_lazy_init(state: FSDPState) -> None:
    """Let the next forward initialise again; the instance may get another root until then."""
    state.is_root = None


def _check_devices(root: FSDPState, states: list[FSDPState]) -> None:
    for state in states:
        if state.handle is None:
            continue
        device = state.handle.flat_param.device
        if state.handle.config.offload_params:
            if device.type != "cpu":
                raise RuntimeError(
                    "An FSDP-managed module with parameter CPU offloading enabled has parameters "
                    f"on {device}. Make sure to not move the module from CPU when offloading "
                    "parameters."
                )
        elif device != root.compute_device:
            raise RuntimeError(
                f"An FSDP-managed module unexpectedly has parameters on {device}. Make sure to "
                f"move the module to {root.compute_device} before training."
            )


def _check_homogeneous(states: list[FSDPState]) -> None:
    for public_name, attribute in HOMOGENEOUS_SETTINGS.items():
        values: set[Any] = {getattr(state, attribute) for state in states}
        if len(values) != 1:
            raise ValueError(f"Expects one homogeneous value for {public_name} but got {values}")


def _warn_of_added_parameters(root: nn.Module, states: list[FSDPState]) -> None:
    places: list[tuple[nn.Module, str]] = []
    others = set().union(*(state.ignored_params for state in states))
    for handle in (state.handle for state in states if state.handle is not None):
        others.add(handle.flat_param)
        places += [(info.module, info.name) for info in handle.metadata.params]
        places += [(info.module, info.name) for info in handle.metadata.shared]
    warn_of_added_parameters(
        root,
        places,
        others,
        since="FullyShardedDataParallel was constructed",
        shown=clean_tensor_name,
    )


def _note_optimizer_in_backward(state: FSDPState) -> None:
    handle = state.handle
    if handle is None:
        return
    if hasattr(handle.flat_param, "_in_backward_optimizers"):
        raise RuntimeError("FSDP optimizer in backward only supported with use_orig_params=True!")
    handle.has_optimizer_in_backward = handle.orig_views is not None and any(
        hasattr(param, "_in_backward_optimizers") for param in handle.orig_views.params
    )


def _make_streams(root: FSDPState, states: list[FSDPState]) -> StepStreams:
    device = root.device_handle
    uses_hybrid = any(state.is_hybrid for state in states)
    # Gathers and scatters inside a node go before the all-reduce between nodes.
    priority = -1 if root.limit_all_gathers and uses_hybrid else 0
    compute = device.current_stream()
    return StepStreams(
        compute=compute,
        pre_unshard=device.new_stream(priority),
        unshard=device.new_stream(priority),
        post_backward=device.new_stream(priority),
        all_reduce=device.new_stream() if uses_hybrid else compute,
    )


def _names_of_units(context: RootContext) -> dict[int, list[str]]:
    names: dict[int, list[str]] = {}
    for prefix, module in context.root.wrapper.named_modules():
        state = state_of(module)
        if state is not None and state.handle is not None:
            clean = clean_tensor_name(f"{prefix}." if prefix else "")
            names[state.handle.unit] = [
                clean + clean_tensor_name(fqn) for fqn in state.handle.metadata.fqns
            ]
    return names

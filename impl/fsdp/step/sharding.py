"""Unshard and reshard of one unit on the right streams, and prefetch of the next."""

from __future__ import annotations

from impl.device import Stream
from impl.fsdp.common import span
from impl.fsdp.flat_param.handle import FlatParamHandle
from impl.fsdp.flat_param.writeback import write_back_orig_params
from impl.fsdp.phases import OUTSIDE_COMPUTATION, DataEvent, UnitPhase
from impl.fsdp.step.order import unit_to_prefetch
from impl.fsdp.step.state import FSDPState


def unshard(
    state: FSDPState,
    handle: FlatParamHandle,
    unshard_stream: Stream,
    pre_unshard_stream: Stream,
    phase: UnitPhase | None = None,
) -> None:
    """Start to gather the parameters of `handle`; their users wait for `unshard_stream`.

    Afterwards the flat parameter and the module attributes are the unsharded ones.

    phase: what they are gathered for; None for the phase that the unit is in.
    """
    device = state.device_handle
    phase = phase or handle.phase
    with device.use_stream(pre_unshard_stream):
        if phase in OUTSIDE_COMPUTATION and handle.skipped_sharded_views:
            # What is summoned may be another copy (in full precision): start from the shards.
            handle.show_sharded_params()
        has_work = write_back_orig_params(handle)
        has_work |= handle.pre_unshard(phase)
    if has_work:
        unshard_stream.wait_stream(pre_unshard_stream)
    if state.limit_all_gathers:
        freed = state.shared.free_events.dequeue_if_needed()
        if freed is not None:
            with span("rate_limiter"):
                freed.synchronize()
    with device.use_stream(unshard_stream):
        handle.unshard(phase)
        handle.post_unshard()


def reshard(state: FSDPState, handle: FlatParamHandle, *, free: bool) -> None:
    """Let the parameters of `handle` be the shards again; `free` also frees the unsharded ones."""
    handle.reshard(free=free)
    if state.limit_all_gathers and free:
        state.shared.free_events.enqueue(state.device_handle.record_event())
    handle.post_reshard()


def settle(state: FSDPState) -> None:
    """Make the compute stream wait for all pending work below the root of `state`."""
    if state.context is None:
        return
    streams, current = state.context.streams, state.device_handle.current_stream()
    for stream in (streams.unshard, streams.post_backward, streams.all_reduce):
        if stream is not current:
            current.wait_stream(stream)


def frees_in_backward(state: FSDPState, handle: FlatParamHandle) -> bool:
    """Whether the unsharded parameters are freed once their gradient is computed.

    Under `no_sync()`, strategies that keep them after the forward keep them on to the next one:
    memory for time, as the user chose.
    """
    return handle.config.uses_sharding and (
        state.sync_gradients or handle.config.reshards_after_forward
    )


def prefetch(state: FSDPState, handle: FlatParamHandle) -> None:
    """Start to gather the unit that comes after `handle`, if that is configured and sensible."""
    context = state.shared
    unit = unit_to_prefetch(
        context.order,
        handle.unit,
        handle.phase,
        state.backward_prefetch,
        state.forward_prefetch,
    )
    if unit is None:
        return
    target, order = context.units[unit], context.order
    in_forward = handle.phase is UnitPhase.FORWARD
    is_wanted = order.awaits_forward(unit) if in_forward else order.awaits_backward(unit)
    if not is_wanted or target.is_prefetched:
        return
    # What attributes show depends on the phase that the unit will be in.
    phase = UnitPhase.FORWARD if in_forward else UnitPhase.BACKWARD_PRE
    streams = context.streams
    unshard(context.owners[unit], target, streams.unshard, streams.pre_unshard, phase)
    target.data_progress.on(DataEvent.PREFETCHED)

"""A unit: parameters that are gathered together, and whose gradients are reduced together.

    phase            what happens                                      parameters
    IDLE                                                               sharded, resharded or whole
    FORWARD          gather, compute, `shard` after it                 whole
    BACKWARD         gather unless whole, compute gradients            whole
    REDUCED          its gradients are on their way                    sharded, or whole

Resharded means divided among fewer ranks, from a forward to its backward.

A unit goes through FORWARD and IDLE once for each forward, and through BACKWARD and REDUCED once
for each backward through one of these. The end of the whole backward makes every unit IDLE.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from impl.device import DeviceHandle
from impl.fully_shard import collectives
from impl.fully_shard.comm import AllGather, PlainAllGather, PlainReduceScatter, ReduceScatter
from impl.fully_shard.memory import WholeMemory
from impl.fully_shard.mesh import Division
from impl.fully_shard.parameter import ShardedParameter
from impl.fully_shard.shared import InFlight, Shared
from impl.state_machine import StateMachine


class Phase(Enum):
    IDLE = auto()
    FORWARD = auto()
    BACKWARD = auto()
    REDUCED = auto()


class Shape(Enum):
    """Which tensors are the modules' parameters."""

    SHARDED = auto()
    RESHARDED = auto()  # divided among fewer ranks, from a forward to its backward
    UNSHARDED = auto()


class Change(Enum):
    UNSHARD = auto()
    RESHARD = auto()
    SHARD = auto()


CHANGES = {
    (Shape.SHARDED, Change.UNSHARD): Shape.UNSHARDED,
    (Shape.RESHARDED, Change.UNSHARD): Shape.UNSHARDED,
    (Shape.UNSHARDED, Change.RESHARD): Shape.RESHARDED,
    (Shape.UNSHARDED, Change.SHARD): Shape.SHARDED,
    (Shape.RESHARDED, Change.SHARD): Shape.SHARDED,
}


class Unit:
    """Parameters that are gathered and reduced together; the module's docstring has its phases.

    Args:
        modules: those that were given to one call of `fully_shard`.
        division: of the parameters, outside of their use.
        after_forward: of the parameters from a forward to its backward; None: whole.
    """

    def __init__(
        self,
        parameters: Sequence[ShardedParameter],
        modules: tuple[nn.Module, ...],
        division: Division,
        after_forward: Division | None,
        device: DeviceHandle,
        policy: MixedPrecisionPolicy,
    ) -> None:
        self.parameters, self.modules = tuple(parameters), modules
        self.division, self.after_forward = division, after_forward
        self.policy = policy
        self.name = ""  # of its modules, once the root is known
        self.phase = Phase.IDLE
        self._state: StateMachine[Shape, Change] = StateMachine(Shape.SHARDED, CHANGES)
        self._whole: WholeMemory | None = None  # from the first gather on
        self.shared = Shared(device)
        self._device = device
        self._gathered: Tensor | None = None  # an all-gather that has not been waited for
        self._partial: Tensor | None = None  # summed over shards, and not yet over replicas
        self._is_prepared = False
        # What users may change
        self.all_gather: AllGather = PlainAllGather()
        self.reduce_scatter: ReduceScatter = PlainReduceScatter()
        self.all_reduce_hook: Callable[[Tensor], None] | None = None
        self.all_reduce_hook_stream: Any = None
        self.scatter_group = division.shard_group
        self.reduces_gradients = True
        self.adds_replicas = True
        self.shards_after_backward = True
        self.gathers_in_backward = True
        self.counts_unused_as_zero = False
        self.only_sums = False
        self.divisor: float | None = None
        self.in_flight_max = 1
        for module in {place.module for p in parameters for place in p.places}:
            module.register_state_dict_pre_hook(self._before_state_dict)
            module.register_load_state_dict_pre_hook(self._before_state_dict)

    def _before_state_dict(self, *_: Any) -> None:
        """State dicts have shards, also of what a forward has left whole."""
        self.shard_fully()

    @property
    def shape(self) -> Shape:
        return self._state.phase

    def __repr__(self) -> str:
        return f"Unit({self.name or 'the root'}, {self.phase.name}, {self.shape.name})"

    def prepare(self) -> None:
        """Before its first use, when the user has finished with changing parameters."""
        if not self._is_prepared and self.shape is Shape.SHARDED:
            for parameter in self.parameters:
                parameter.adopt_changes()
            self._is_prepared = True
        self._check_devices()
        for parameter in self.parameters:
            parameter.set_precision(self.policy)
        trained = [p for p in self.parameters if p.sharded.requires_grad]
        for what, dtypes in (
            ("original parameter", {p.dtype for p in trained}),
            ("reduce", {p.reduce_dtype for p in trained}),
        ):
            if len(dtypes) > 1:
                raise AssertionError(f"FSDP expects uniform {what} dtype but got {dtypes}")

    def _check_devices(self) -> None:
        on_meta = [p.name for p in self.parameters if p.sharded.is_meta]
        if on_meta:
            raise RuntimeError(
                "FSDP parameters should be materialized from meta device before training, but the "
                f"following were still on meta device: {on_meta}\nFor example, call "
                "module.to_empty(device) to materialize to device and call "
                "module.reset_parameters() on each module to initialize values."
            )
        elsewhere = [
            (p.name, p.sharded.device)
            for p in self.parameters
            if p.offload and p.sharded.device.type != "cpu"
        ]
        if elsewhere:
            raise RuntimeError(
                "FSDP parameters should be materialized on CPU when enabling CPU offloading. For "
                'example, load a CPU state dict or call module.to_empty(device="cpu"). Found '
                f"following parameters on non-CPU device: {elsewhere}"
            )

    # Gathering and sharding

    def gather(self, ahead_of: Phase | None = None) -> None:
        """Start the all-gather, unless the parameters are whole or on their way.

        ahead_of: a forward or backward that is still to come; None for what runs now.
        """
        phase = ahead_of or self.phase
        if self.shape is Shape.UNSHARDED or self._gathered is not None:
            return
        if phase is Phase.BACKWARD and not self.gathers_in_backward:
            return
        division, stream = self.division, self.shared.gather_stream
        if self.shape is Shape.RESHARDED:
            assert self.after_forward is not None
            division = self.after_forward
        if phase is Phase.IDLE or self.shape is Shape.RESHARDED:
            # By hand, or from parts that the forward has copied; otherwise the step has waited.
            stream.wait_stream(self._device.current_stream())
        with self._device.use_stream(stream), torch.no_grad():
            self._gathered = collectives.gather(
                self._device, self.parameters, division.shard_group, self.all_gather
            )
        self.shared.note("gather", self.name)

    def wait(self) -> None:
        """Wait for the all-gather, if there is one, and give the modules the whole parameters."""
        rows, self._gathered = self._gathered, None
        if rows is None:
            return
        self._device.current_stream().wait_stream(self.shared.gather_stream)
        if self._whole is None:
            self._whole = WholeMemory(self._device, self.parameters)
        with torch.no_grad():
            self._whole.allocate()
            collectives.spread(self.parameters, rows)
            for parameter in self.parameters:
                parameter.to_unsharded()
        self._device.record_stream(rows, self._device.current_stream())
        self._state.on(Change.UNSHARD)

    def shard(self) -> None:
        """Free the whole parameters; after a forward as the user has chosen for that."""
        if self.phase is Phase.FORWARD:
            if self.after_forward is None:
                return
            if self.after_forward is not self.division:
                self._reshard(self.after_forward)
                return
        self.shard_fully()

    def _reshard(self, division: Division) -> None:
        if self.shape is Shape.UNSHARDED:
            with torch.no_grad():
                for parameter in self.parameters:
                    parameter.to_resharded(division)
            self._free(Change.RESHARD)

    def shard_fully(self) -> None:
        if self.shape is not Shape.SHARDED:
            for parameter in self.parameters:
                parameter.to_sharded()
            self._free(Change.SHARD)

    def _free(self, change: Change) -> None:
        """The whole parameters are not the modules' any more."""
        self._state.on(change)
        assert self._whole is not None
        self._whole.free()

    # One step

    def begin_forward(self) -> bool:
        """Returns whether a pass begins, and not only the next of the unit's modules runs."""
        begins = self.phase is not Phase.FORWARD
        self.phase = Phase.FORWARD
        self.gather()
        self.wait()
        return begins

    def end_forward(self, is_recomputed: bool) -> None:
        """is_recomputed: a checkpoint runs it in a backward, which needs the parameters then."""
        if not is_recomputed:
            self.shard()
        self.phase = Phase.IDLE

    def begin_backward(self) -> bool:
        """Returns whether it begins, and not only the gradient of another output has arrived."""
        if self.phase is Phase.BACKWARD:
            return False
        self.phase = Phase.BACKWARD
        self.gather()
        self.wait()
        return True

    @torch.no_grad()
    def end_backward(self) -> None:
        """All gradients of this pass are there. Does nothing for a unit that has none."""
        self.phase = Phase.REDUCED
        for parameter in self.parameters:
            parameter.add_to_accumulated()
        if not self.reduces_gradients:
            if self.shards_after_backward:
                self.shard()
            for parameter in self.parameters:
                parameter.keep_for_later()
            return
        taken = [(p, p.take_gradient(self.counts_unused_as_zero)) for p in self.parameters]
        if self.shards_after_backward:
            self.shard()
        parameters = [parameter for parameter, gradient in taken if gradient is not None]
        gradients = [gradient for _, gradient in taken if gradient is not None]
        del taken
        if parameters:
            self._reduce(parameters, gradients)

    def _reduce(self, parameters: list[ShardedParameter], gradients: list[Tensor]) -> None:
        dtypes = {gradient.dtype for gradient in gradients}
        if len(dtypes) > 1:
            raise AssertionError(
                f"FSDP reduce-scatter expects uniform gradient dtype but got {dtypes}"
            )
        self.shared.make_room()
        device, division = self._device, self.division
        dtype = parameters[0].reduce_dtype or gradients[0].dtype
        how = collectives.averaging(division, dtype, self.divisor, self.only_sums)
        numel = sum(parameter.flat_shard.numel() for parameter in parameters)
        rows = self.reduce_scatter.allocate(
            (division.shard_count * numel,), dtype=dtype, device=gradients[0].device
        ).view(division.shard_count, numel)
        collectives.lay_out(gradients, parameters, rows)
        gradients.clear()  # their memory is free from here on
        stream = self.shared.reduce_stream
        stream.wait_stream(device.current_stream())
        with device.use_stream(stream):
            collectives.divide(device, rows, how.before)
            row = collectives.scatter(
                device, rows, self.scatter_group, how.scatter_op, self.reduce_scatter
            )
            self.shared.note("reduce", self.name)
            self.shared.in_flight.append(InFlight(rows, device.record_event()))
        self._after_scatter(parameters, row, how)

    def _after_scatter(
        self, parameters: Sequence[ShardedParameter], row: Tensor, how: collectives.Averaging
    ) -> None:
        """What follows the reduce-scatter: replicas, the user's hook, division, accumulation."""
        device, shared, replicas = self._device, self.shared, self.division.replica_group
        if replicas is not None:
            with device.use_stream(shared.reduce_stream):
                self._add_partial(row)
            if not self.adds_replicas:
                self._partial = row
                return
            shared.replica_stream.wait_stream(shared.reduce_stream)
            with device.use_stream(shared.replica_stream):
                collectives.add_replicas(device, row, replicas, how.replica_op)
            shared.note("add replicas", self.name)
        stream = shared.reduce_stream if replicas is None else shared.replica_stream
        if self.all_reduce_hook is not None:
            own = self.all_reduce_hook_stream or shared.replica_stream
            own.wait_stream(stream)
            stream = own
            with device.use_stream(stream):
                device.flush()
                self.all_reduce_hook(row)
        device.record_stream(row, stream)  # it was allocated on the stream of the reduce-scatter
        with device.use_stream(stream):
            collectives.divide(device, row, how.after)
            device.enqueue(lambda: _accumulate(parameters, row), reads=(row,), writes=())
            shared.gradient_streams[stream] = None

    def _add_partial(self, row: Tensor) -> None:
        partial, self._partial = self._partial, None
        if partial is not None:
            self._device.enqueue(lambda: row.add_(partial), reads=(partial, row), writes=(row,))

    def drop_gather(self) -> None:
        """The backward is over: what was gathered for one that did not come is not needed."""
        if self._gathered is not None:
            self._device.current_stream().wait_stream(self.shared.gather_stream)
            self._gathered = None

    def reset(self) -> None:
        """After an exception: what is on its way is waited for and lost."""
        self.drop_gather()
        self._partial = None
        self.phase = Phase.IDLE
        self.shard_fully()
        for parameter in self.parameters:
            parameter.forget_gradient()


def _accumulate(parameters: Sequence[ShardedParameter], row: Tensor) -> None:
    row = row.to(parameters[0].dtype)
    parts = row.split([parameter.flat_shard.numel() for parameter in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        shard = parameter.as_shard(part)
        parameter.put_gradient(shard.cpu() if parameter.offload else shard)

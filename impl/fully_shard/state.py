"""Hooks of one call of `fully_shard`: they gather before a forward and backward, and reduce after.

A module that `fully_shard` was applied to has a `State`. Its hooks run in this order:

    forward     pre-forward: cast inputs, gather; note where the backward of its inputs will end
                post-forward: shard; note where the backward of its outputs will begin
    backward    first gradient of an output: gather, and gather the unit before ahead
                gradients of all inputs are there: reduce
                end of the whole backward: units whose inputs need no gradients, and all waits

The first module whose forward runs is the root. It gives all States below it one `Step`.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from impl.added_parameters import warn_of_added_parameters
from impl.device import DeviceHandle
from impl.fully_shard.shared import Shared
from impl.fully_shard.unit import Phase, Unit
from impl.nested_tensors import map_tensors, tensors_in
from impl.torch_dispatch import never_traced
from impl.torch_private import is_backward_running, move_inputs, queue_backward_callback

_IN_PLACE = (
    "An in-place op on this view (e.g., `x += y`) will silently drop the pre-backward hook and "
    "skip the all-gather, which can cause backward to fail or produce wrong gradients. Use "
    "out-of-place ops (`out = out + y`, not `out += y`) or `.clone()` the output before any "
    "in-place op."
)
_KEY = "_fully_shard_state"  # in the `__dict__` of a sharded module


@dataclass
class Step:
    """One training step of a root.

    states: all of them, each before those below it.
    forward_order: states with units in the order in which their forwards ended, once for each.
    forward_root: the state whose forward is the outermost of those that run.
    """

    states: list[State] = field(default_factory=list)
    forward_order: list[State] = field(default_factory=list)
    forward_root: State | None = None
    end_is_queued: bool = False
    is_last_backward: bool = True
    optimizer_is_done: Any = None


def state_of(module: nn.Module) -> State | None:
    return module.__dict__.get(_KEY)


class State:
    """Hooks of one call of `fully_shard`; their order stands in the module's docstring."""

    def __init__(
        self,
        modules: tuple[nn.Module, ...],
        units: Sequence[Unit],
        device: DeviceHandle,
        policy: MixedPrecisionPolicy,
        chooses_after_forward: bool,
        ignored: Set[nn.Parameter],
    ) -> None:
        """
        Args:
            chooses_after_forward: the user left it open, so the root keeps its parameters whole.
            ignored: parameters that are left alone.
        """
        self.modules, self.units = modules, list(units)
        self.phase = Phase.IDLE
        self.step = Step()
        self.shared = Shared(device) if not units else units[0].shared
        self.is_root: bool | None = None  # once the first forward has run
        self.gather_ahead_in_forward: list[State] = []
        self.gather_ahead_in_backward: list[State] = []
        self.chooses_after_forward = chooses_after_forward
        self.ignored = ignored
        self._device, self._policy = device, policy
        self._forward_indices: list[int] = []  # in `forward_order`, of those without a backward yet
        self._still_to_run: set[nn.Module] = set()  # of a pass that has begun
        for module in modules:
            module.__dict__[_KEY] = self
            module.register_forward_pre_hook(self.before_forward, prepend=True, with_kwargs=True)
            module.register_forward_hook(self.after_forward, always_call=len(modules) > 1)

    # The root

    def _find_root(self) -> None:
        """In the first forward: its module is the root of all below it."""
        if self.is_root is not None:
            return
        if len(self.modules) > 1:
            raise RuntimeError(f"FSDP requires a single root module but got {self.modules}")
        root = self.modules[0]
        below: dict[State, None] = {}
        for name, module in root.named_modules():
            state = state_of(module)
            if state is None:
                continue
            if state is not self and state not in below and state.is_root is not None:
                raise RuntimeError(
                    f"FSDP state has already been lazily initialized for {name}\nFSDP requires "
                    "running forward through the root module first"
                )
            below[state] = None
        self.step.states = list(below)
        for state in below:
            state.is_root = state is self
            state.step, state.shared = self.step, self.shared
            for unit in state.units:
                unit.shared = self.shared
        if self.chooses_after_forward:
            for unit in self.units:
                unit.after_forward = None
        try:
            self._prepare_all(root)
        except BaseException:  # the next forward is refused as well
            self.phase = Phase.IDLE
            self._still_to_run.clear()
            for state in below:
                state.is_root = None
            raise

    def _prepare_all(self, root: nn.Module) -> None:
        self._name_all(root)
        self._warn_of_added_parameters(root)
        units = self._all_units()
        self.shared.in_flight_max = max((unit.in_flight_max for unit in units), default=1)
        for unit in units:
            unit.prepare()

    def _all_units(self) -> list[Unit]:
        return [unit for state in self.step.states for unit in state.units]

    def _name_all(self, root: nn.Module) -> None:
        names = {param: name for name, param in root.named_parameters()}
        module_names = {module: name for name, module in root.named_modules()}
        seen: dict[int, str] = {}
        for unit in self._all_units():
            unit.name = ", ".join(module_names[module] for module in unit.modules)
            for parameter in unit.parameters:
                parameter.name = names.get(parameter.sharded, parameter.name)
                if parameter.original_id in seen:
                    raise ValueError(
                        f"Parameter '{parameter.name}' is shared with a parameter already managed "
                        "by another FSDP group. For shared/tied parameters, use "
                        "fully_shard([module_a, module_b]) to place them in the same FSDP group."
                    )
                seen[parameter.original_id] = parameter.name

    def _warn_of_added_parameters(self, root: nn.Module) -> None:
        parameters = [p for unit in self._all_units() for p in unit.parameters]
        warn_of_added_parameters(
            root,
            [place for parameter in parameters for place in parameter.places],
            set().union(*(state.ignored for state in self.step.states)),
            since="fully_shard was applied",
        )

    # Forward

    @never_traced
    def before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        if self.phase is Phase.BACKWARD:  # a checkpoint runs the forward again
            for unit in self.units:
                unit.gather()
                unit.wait()
            return self._cast_inputs(args, kwargs)
        if not self._still_to_run:
            self._still_to_run.update(self.modules)
        begins = self.phase is not Phase.FORWARD
        self.phase = Phase.FORWARD
        if begins:
            args, kwargs = self._begin_step(args, kwargs)
        args, kwargs = self._cast_inputs(args, kwargs)
        for unit in self.units:
            if unit.begin_forward():
                args, kwargs = _call_after_backward_of(unit, args, kwargs)
        if begins:
            for state in self.gather_ahead_in_forward:
                for unit in state.units:
                    unit.gather(ahead_of=Phase.FORWARD)
        return args, kwargs

    def _begin_step(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        self._find_root()
        if self.step.forward_root is not None:
            return args, kwargs
        self.step.forward_root = self
        event, self.step.optimizer_is_done = self.step.optimizer_is_done, None
        if event is not None:
            self.shared.gather_stream.wait_event(event)
        else:
            self.shared.gather_stream.wait_stream(self._device.current_stream())
        if self._device.type != "cpu" and (args or kwargs):
            args, kwargs = move_inputs(args, kwargs, self._device.current_device(), False)
        return args, kwargs

    @never_traced
    def after_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        if self.phase is Phase.BACKWARD:
            return self._cast_output(output)
        if module not in self._still_to_run:
            return self._cast_output(output)
        self._still_to_run.discard(module)
        if self._still_to_run:
            return self._cast_output(output)
        output = self._end_forward(output)
        if self.step.forward_root is self:
            output = self._end_others(output)
            self.step.forward_root = None
        return self._cast_output(output)

    def _end_forward(self, output: Any) -> Any:
        is_recomputed = is_backward_running()
        for unit in self.units:
            unit.end_forward(is_recomputed)
        if not is_recomputed and self.units:
            self._forward_indices.append(len(self.step.forward_order))
            self.step.forward_order.append(self)
        self.phase = Phase.IDLE
        return self._call_before_backward_of(output)

    def _end_others(self, output: Any) -> Any:
        """End the forward of states of several modules of which some did not run."""
        for state in reversed(self.step.states):
            if state is not self and state._still_to_run:
                state._still_to_run.clear()
                output = state._cast_output(state._end_forward(output))
        return output

    def _cast_inputs(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        dtype = self._policy.param_dtype
        if dtype is None or not self._policy.cast_forward_inputs:
            return args, kwargs
        return _cast(args, dtype), _cast(kwargs, dtype)

    def _cast_output(self, output: Any) -> Any:
        dtype = self._policy.output_dtype
        return output if dtype is None else _cast(output, dtype)

    # Backward

    def _call_before_backward_of(self, output: Any) -> Any:
        if not torch.is_grad_enabled():
            return output
        for tensor in tensors_in(output):
            if not tensor.requires_grad:
                continue
            if tensor._is_view():
                names = ", ".join(type(module).__name__ for module in self.modules)
                warnings.warn(
                    f"FSDP2-wrapped module ({names}) returned a view tensor. {_IN_PLACE}",
                    stacklevel=2,
                )
            tensor.register_hook(self._before_backward)
        return output

    def _before_backward(self, gradient: Tensor) -> None:
        self.phase = Phase.BACKWARD
        if not self.step.end_is_queued:
            queue_backward_callback(self._end_step)
            self.step.end_is_queued = True
        begins = [unit.begin_backward() for unit in self.units]
        if not self.gather_ahead_in_backward and any(begins):
            self._gather_ahead(self._state_to_prefetch())
        else:
            self._gather_ahead(self.gather_ahead_in_backward)

    def _state_to_prefetch(self) -> Sequence[State]:
        """The state whose forward came before this one's, and whose backward comes next."""
        index = self._forward_indices.pop() if self._forward_indices else 0
        return self.step.forward_order[max(index - 1, 0) : index]

    def _gather_ahead(self, states: Sequence[State]) -> None:
        for state in states:
            for unit in reversed(state.units):
                unit.gather(ahead_of=Phase.BACKWARD)

    def _end_step(self) -> None:
        """The whole backward is over."""
        step = self.step
        step.forward_root = None
        for state in step.states:
            state._still_to_run.clear()
            for unit in reversed(state.units):
                # none of its inputs needed a gradient, or it had no part in this backward
                if unit.phase is not Phase.REDUCED:
                    unit.end_backward()
                unit.phase = Phase.IDLE
            state.phase = Phase.IDLE
        if step.is_last_backward:
            for state in step.states:
                state._forward_indices.clear()
                for unit in state.units:
                    unit.drop_gather()
            step.forward_order.clear()
            self.shared.wait_for_gradients()
        step.end_is_queued = False

    def reset(self) -> None:
        """After an exception in a forward or backward, of the root: as if it had not begun."""
        if self.is_root is False:
            raise RuntimeError("reset_iter_state must be called on the root FSDP module")
        self.step.forward_order.clear()
        self.shared.wait_for_gradients()
        for state in self.step.states or [self]:
            state._still_to_run.clear()
            state._forward_indices.clear()
            state.phase = Phase.IDLE
            for unit in state.units:
                unit.reset()
        self.step.forward_root = None
        self.step.end_is_queued = False


def _cast(tree: Any, dtype: torch.dtype) -> Any:
    return map_tensors(lambda x: x.to(dtype) if x.is_floating_point() else x, tree)


def _call_after_backward_of(unit: Unit, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Have `unit.end_backward` called when the gradients of all inputs have been computed."""
    if not torch.is_grad_enabled():
        return args, kwargs
    inputs = [tensor for tensor in tensors_in((args, kwargs)) if tensor.requires_grad]
    if not inputs:
        return args, kwargs
    passed = iter(_EndOfBackward.apply(unit, *inputs))  # type: ignore[no-untyped-call]  # torch's
    return map_tensors(lambda x: next(passed) if x.requires_grad else x, (args, kwargs))


class _EndOfBackward(torch.autograd.Function):
    """The identity of a module's inputs; its backward is the last of the module's."""

    @staticmethod
    def forward(ctx: Any, unit: Unit, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.unit = unit
        return inputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ctx.unit.end_backward()
        return (None, *gradients)

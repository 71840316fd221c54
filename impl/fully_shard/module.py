"""`FSDPModule`: the methods that a module gains from `fully_shard`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.fsdp import UnshardHandle

from impl.fully_shard.comm import AllGather, PlainAllGather, PlainReduceScatter, ReduceScatter
from impl.fully_shard.mesh import division_after_forward
from impl.fully_shard.shared import Event
from impl.fully_shard.state import State, state_of
from impl.fully_shard.unit import Unit


class FSDPModule(TorchFSDPModule):
    """Base class of modules that `fully_shard` was applied to; also one of torch's, for its users.

    Methods with `recurse` apply to all such modules below, unless it is False.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Of the original class: slices of a container, for example, are not sharded."""
        original = cls.__mro__[cls.__mro__.index(TorchFSDPModule) + 1]
        made = original.__new__(original, *args, **kwargs)
        made.__init__(*args, **kwargs)
        return made

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise AssertionError(
            "FSDP does not support deepcopy. Please use state dict for serialization."
        )

    def _get_fsdp_state(self) -> Any:
        state = state_of(self)  # type: ignore[arg-type]  # a module as well
        if state is None:
            raise AssertionError(f"No FSDP state found on {self}")
        return state

    @property
    def _units(self) -> list[Unit]:
        state: State = self._get_fsdp_state()
        return state.units

    @property
    def _only_unit(self) -> Unit | None:
        """For what is set for one unit. Raises ValueError for a module of several."""
        units = self._units
        if len(units) > 1:
            raise ValueError(
                "this is not supported with multiple param groups (from per-param mesh via "
                "shard_placement_fn): it would be ambiguous across groups with different meshes"
            )
        return units[0] if units else None

    def _set(self, recurse: bool, **settings: Any) -> None:
        for module in self._sharded_modules(recurse):
            for unit in module._units:
                for name, value in settings.items():
                    setattr(unit, name, value)

    # Whole parameters and shards

    def reshard(self) -> None:
        """Free the whole parameters of this module, and of no other one."""
        for unit in self._units:
            unit.shard()

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather the parameters of this module, and of no other one.

        async_op: return a handle whose `wait` makes them usable; the forward waits as well.
        """
        for unit in self._units:
            unit.prepare()
            unit.gather()
        handle = _Gathering(self._units)
        if async_op:
            return handle
        handle.wait()
        return None

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether parameters are freed between a forward and its backward."""
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(
                f"reshard_after_forward should be a bool, got {type(reshard_after_forward)}"
            )
        for module in self._sharded_modules(recurse):
            module._get_fsdp_state().chooses_after_forward = False
            for unit in module._units:
                unit.after_forward = division_after_forward(reshard_after_forward, unit.division)

    def _sharded_modules(self, recurse: bool) -> Sequence[FSDPModule]:
        modules: Iterable[Any] = self.modules() if recurse else (self,)  # type: ignore[attr-defined]  # a module as well
        return [module for module in modules if isinstance(module, FSDPModule)]

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Whether parameters are freed after a backward; not to do so saves the next all-gather."""
        self._set(recurse, shards_after_backward=reshard_after_backward)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """False: no backward needs this module's parameters, as with an embedding."""
        self._set(False, gathers_in_backward=unshard_in_backward)

    # Gradients

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Whether backwards reduce gradients; if not, each rank accumulates its own, whole."""
        self._set(
            recurse,
            reduces_gradients=requires_gradient_sync,
            adds_replicas=requires_gradient_sync,
        )

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Whether backwards add up replicas; if not, each replica accumulates its shards."""
        self._set(recurse, adds_replicas=requires_all_reduce)

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Whether the next backward is the last before the optimizer, and waits for gradients."""
        self._get_fsdp_state().step.is_last_backward = is_last_backward

    def set_gradient_divide_factor(self, factor: float) -> None:
        """By what the sum of the gradients is divided, in the place of the number of ranks."""
        self._set(False, divisor=factor)

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """The old name of `set_gradient_divide_factor`."""
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Reduce by sums alone, and divide before and after them."""
        self._set(False, only_sums=enable)

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Whether a parameter without gradient counts as zero, as ranks that used it need it."""
        self._set(recurse, counts_unused_as_zero=reduce_scatter_unused_params)

    def set_all_reduce_hook(self, hook: Callable[[Tensor], None], *, stream: Any = None) -> None:
        """Call `hook(reduced)` for each reduced row of gradients, (numel,), to change it in place.

        stream: where it runs; not with replicas of one's own, whose stream it then is.
        """
        unit = self._only_unit
        if unit is None:
            return
        if stream is not None and unit.division.replica_group is not None:
            raise ValueError("stream cannot be set when using native HSDP")
        unit.all_reduce_hook, unit.all_reduce_hook_stream = hook, stream

    # Order

    def set_modules_to_forward_prefetch(self, modules: list[Any]) -> None:
        """Start the all-gathers of these when this module's forward begins."""
        self._get_fsdp_state().gather_ahead_in_forward = _states_of(modules)

    def set_modules_to_backward_prefetch(self, modules: list[Any]) -> None:
        """Start the all-gathers of these when this module's backward begins.

        By default it is the one whose forward came before this one's.
        """
        self._get_fsdp_state().gather_ahead_in_backward = _states_of(modules)

    def set_post_optim_event(self, event: Any) -> None:
        """Have the next all-gathers wait for this event instead of all work before them."""
        self._get_fsdp_state().step.optimizer_is_done = event

    def reset_iter_state(self) -> None:
        """After an exception in a forward or backward: make the root ready for the next step.

        Gradients of that step that were not reduced yet are lost. Raises RuntimeError on a module
        that is not the root.
        """
        self._get_fsdp_state().reset()

    # Communication

    def set_custom_all_gather(self, comm: AllGather) -> None:
        """Have this module's parameters gathered by it."""
        if unit := self._only_unit:
            unit.all_gather = comm

    def set_custom_reduce_scatter(self, comm: ReduceScatter) -> None:
        """Have this module's gradients reduced by it."""
        if unit := self._only_unit:
            unit.reduce_scatter = comm

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Take the memory of collectives from the group, if it offers that."""
        for unit in self._units:
            own_ways = (PlainAllGather, PlainReduceScatter)
            for comm in (unit.all_gather, unit.reduce_scatter):
                if not isinstance(comm, own_ways):
                    raise AssertionError(
                        "cannot call set_allocate_memory_from_process_group() when a comm is "
                        f"custom: {type(comm).__name__}"
                    )
            unit.all_gather = PlainAllGather(unit.division.shard_group if enable else None)
            unit.reduce_scatter = PlainReduceScatter(unit.scatter_group if enable else None)

    def set_separate_reduce_scatter_group(
        self, enable: bool = True, *, recurse: bool = True
    ) -> None:
        """Reduce in a group of its own, so that all-gathers go on beside it. Of all ranks."""
        made: dict[tuple[int, ...], dist.ProcessGroup] = {}
        for module in self._sharded_modules(recurse):
            for unit in module._units:
                shared = unit.division.shard_group
                if not enable:
                    unit.scatter_group = shared
                    continue
                ranks = tuple(dist.get_process_group_ranks(shared))
                if unit.scatter_group is not shared:
                    made.setdefault(ranks, unit.scatter_group)
                if ranks not in made:
                    made[ranks] = dist.new_group(list(ranks), use_local_synchronization=True)
                unit.scatter_group = made[ranks]

    def set_reduce_scatter_max_input_buffers(
        self, max_input_buffers: int, *, recurse: bool = True
    ) -> None:
        """How many inputs of reduce-scatters may be in memory at once; the largest one counts."""
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise TypeError(
                f"max_input_buffers must be an int, got {type(max_input_buffers).__name__}"
            )
        if max_input_buffers < 1:
            raise ValueError(f"max_input_buffers must be a positive int, got {max_input_buffers}")
        self._set(recurse, in_flight_max=max_input_buffers)

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> NoReturn:
        """Not supported: symmetric memory is NCCL's."""
        raise NotImplementedError("collectives on symmetric memory are not supported")

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """All-gathers run beside the host's work anyway."""

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """`module.to(...)` and the like see shards, and what they leave is divided anew."""
        self.reshard()
        result = super(TorchFSDPModule, self)._apply(*args, **kwargs)  # type: ignore[misc]  # the module's
        with torch.no_grad():
            for unit in self._units:
                for parameter in unit.parameters:
                    parameter.adopt_changes()
        return result


class _Gathering(UnshardHandle):
    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = units

    def wait(self) -> None:
        units, self._units = self._units, ()
        for unit in units:
            unit.wait()


def _states_of(modules: Iterable[Any]) -> list[State]:
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ValueError(f"Expects FSDPModule but got {type(module)}: {module}")
    return [module._get_fsdp_state() for module in modules]


def sharded_class(original: type[nn.Module]) -> type[nn.Module]:
    """The class, with `FSDPModule` before it: the same one each time."""
    if original not in _SHARDED_CLASSES:
        bases = (FSDPModule, original)
        _SHARDED_CLASSES[original] = type(f"FSDP{original.__name__}", bases, {})
    return _SHARDED_CLASSES[original]


_SHARDED_CLASSES: dict[type[nn.Module], type[nn.Module]] = {}


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Have a method count as a forward: parameters are gathered before it and freed after it.

    Does nothing for a module that is not sharded. Raises ValueError if there is no such method.
    """
    if not isinstance(module, FSDPModule):
        return
    if not hasattr(module, method_name):
        raise ValueError(f"{type(module)} does not have a method {method_name}")
    method = getattr(module, method_name)

    @functools.wraps(method)
    def as_forward(*args: Any, **kwargs: Any) -> Any:
        state: State = module._get_fsdp_state()
        args, kwargs = state.before_forward(module, args, kwargs)
        return state.after_forward(module, args, method(*args, **kwargs))

    setattr(module, method_name, as_forward)


def share_comm_ctx(modules: list[Any]) -> None:
    """Have several roots use the same streams, as the stages of a pipeline do."""
    states = _states_of(modules)
    for state in states[1:]:
        state.shared = states[0].shared
        for unit in state.units:
            unit.shared = state.shared


@contextmanager
def recorded_schedule(module: FSDPModule) -> Iterator[list[Event]]:
    """Record when the units below a root start their collectives; each line can be printed.

    The root has run a forward before, or runs its first one inside.
    """
    events: list[Event] = []
    module._get_fsdp_state().shared.events = events
    try:
        yield events
    finally:
        module._get_fsdp_state().shared.events = None

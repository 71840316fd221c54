"""`FSDPState` of an instance, the context and streams shared under a root, lookup in module trees.

The wrapper module (`api.py`) holds one `FSDPState` and is otherwise an ordinary `nn.Module`. All
layers below work on states; they find the states of a module tree with `states_in`.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    MixedPrecision,
    OptimStateDictConfig,
    ShardingStrategy,
    StateDictConfig,
    StateDictType,
)

from impl.device import DeviceHandle, Stream
from impl.fsdp.collectives import DivideFactors
from impl.fsdp.common import HYBRID_STRATEGIES, TrainingState
from impl.fsdp.flat_param.handle import FlatParamHandle
from impl.fsdp.phases import TRAINING_STATES, UnitPhase, UnitProgress
from impl.fsdp.step.limiter import FreeEventQueue
from impl.fsdp.step.order import ExecutionOrder
from impl.torch_private import CHECKPOINT_WRAPPED_MODULE, ActivationWrapper, composed_apis

# The attribute of a wrapper module that holds its state.
STATE_ATTRIBUTE = "_fsdp_state"


@dataclass
class StepStreams:
    """The streams of a root and the units below it.

    Attributes:
        compute: the stream on which the user's forward runs.
        pre_unshard: casts and host-to-device copies that a gather needs.
        unshard: allocation and all-gathers.
        post_backward: gradient reduction.
        all_reduce: the second reduction of hybrid sharding; `compute` if there is none.
    """

    compute: Stream
    pre_unshard: Stream
    unshard: Stream
    post_backward: Stream
    all_reduce: Stream


class RootContext:
    """What all instances under one root share, from lazy initialisation on.

    Attributes:
        units: the flat parameter handles, in the depth-first order of their modules, which is the
            same on every rank; `handle.unit` is a handle's position.
        owners: the state of each unit's instance.
        param_names: the names of each unit's original parameters, seen from the root.
        final_callback_queued: whether the end-of-backward callback waits in autograd.
        buffers_in_full_precision: whether buffers were raised to full precision for a forward, and
            may have to be lowered before the next one.
    """

    def __init__(self, root: FSDPState, states: list[FSDPState], streams: StepStreams) -> None:
        self.root = root
        self.states = states
        self.streams = streams
        self.order = ExecutionOrder()
        self.free_events = FreeEventQueue()
        self.final_callback_queued = False
        self.buffers_in_full_precision = False
        self.owners = [state for state in states if state.handle is not None]
        self.units = [state.handle for state in self.owners if state.handle is not None]
        self.param_names: dict[int, list[str]] = {}
        for position, handle in enumerate(self.units):
            handle.unit = position


@dataclass(eq=False)
class FSDPState:
    """One FSDP instance. `wrapper` is the `FullyShardedDataParallel` module, `module` is inside."""

    wrapper: nn.Module
    module: nn.Module
    # Groups
    process_group: dist.ProcessGroup  # the ranks that share the flat parameter
    inter_node_group: dist.ProcessGroup | None  # the ranks with the same shard (hybrid sharding)
    device_mesh: DeviceMesh | None
    divide_factors: DivideFactors
    # Settings
    sharding_strategy: ShardingStrategy
    mixed_precision: MixedPrecision
    cpu_offload: CPUOffload
    backward_prefetch: BackwardPrefetch | None
    forward_prefetch: bool
    limit_all_gathers: bool
    use_orig_params: bool
    uses_full_precision_in_eval: bool
    # Devices
    device_handle: DeviceHandle
    compute_device: torch.device
    # What it leaves alone
    ignored_modules: set[nn.Module]
    ignored_params: set[nn.Parameter]
    ignored_buffer_names: set[str]
    synced_module_states: bool
    # Buffers of `module`, by clean name, with the dtypes that they had
    buffer_dtypes: dict[str, torch.dtype]

    handle: FlatParamHandle | None = None
    # Run time
    progress: UnitProgress = field(default_factory=UnitProgress)  # the handle's, if there is one
    is_root: bool | None = None  # None until lazy initialisation
    context: RootContext | None = None
    sync_gradients: bool = True
    comm_hook: Callable[..., Any] | None = None
    comm_hook_state: object = None
    # State dicts
    state_dict_type: StateDictType = StateDictType.FULL_STATE_DICT
    state_dict_config: StateDictConfig = field(default_factory=FullStateDictConfig)
    optim_state_dict_config: OptimStateDictConfig = field(default_factory=FullOptimStateDictConfig)
    unsharded_for_state_dict: AbstractContextManager[None] | None = None

    @property
    def phase(self) -> UnitPhase:
        return self.progress.phase

    @property
    def training_state(self) -> TrainingState:
        return TRAINING_STATES[self.phase]

    @property
    def rank(self) -> int:
        return self.process_group.rank()

    @property
    def world_size(self) -> int:
        return self.process_group.size()

    @property
    def is_hybrid(self) -> bool:
        return self.sharding_strategy in HYBRID_STRATEGIES

    @property
    def replica_group(self) -> dist.ProcessGroup:
        """The ranks whose gradients are averaged without being scattered (`NO_SHARD`).

        That is the inter-node group if the user asked for hybrid sharding over groups of one rank.
        (torch 2.13 averages over that one rank, so the replicas drift apart.)
        """
        return self.inter_node_group or self.process_group

    @property
    def innermost_module(self) -> nn.Module:
        """The wrapped module, under an activation checkpointing wrapper if there is one."""
        if isinstance(self.module, ActivationWrapper):
            inner: nn.Module = getattr(self.module, CHECKPOINT_WRAPPED_MODULE)
            return inner
        return self.module

    @property
    def shared(self) -> RootContext:
        assert self.context is not None, "lazy initialisation has not run"
        return self.context

    def hidden_params(self) -> list[nn.Parameter]:
        """Original parameters in whose place the module shows plain tensors until its backward."""
        handle = self.handle
        if handle is None or handle.orig_views is None or not handle.skipped_sharded_views:
            return []
        return handle.orig_views.all_params()

    def require(self, *allowed: TrainingState) -> None:
        """Raise unless the instance is in one of the states `allowed`.

        Raises:
            ValueError: also under `python -O`.
        """
        if self.training_state not in allowed:
            raise ValueError(
                f"expected to be in states {list(allowed)} but current state is "
                f"{self.training_state}: {self.handle}"
            )


def state_of(module: nn.Module) -> FSDPState | None:
    """The state of `module` if it is an FSDP wrapper (not if it merely contains one)."""
    state: FSDPState | None = module.__dict__.get(STATE_ATTRIBUTE)
    return state


_wrapped: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def mark_wrapped(module: nn.Module) -> None:
    """Note that an FSDP instance wraps `module`."""
    _wrapped.add(module)


def is_wrapped(module: nn.Module) -> bool:
    """Whether some FSDP instance wraps `module` itself."""
    return module in _wrapped


def states_in(module: nn.Module) -> list[FSDPState]:
    """The states of all FSDP instances in the tree of `module`, depth first, `module` included.

    Subtrees under torch's `replicate` are left out: they take care of themselves.
    """
    states: list[FSDPState] = []
    seen: set[nn.Module] = set()
    for submodule in _depth_first(module, seen):
        state = state_of(submodule)
        if state is not None:
            states.append(state)
    return states


def _depth_first(module: nn.Module, seen: set[nn.Module]) -> Generator[nn.Module, None, None]:
    pending = deque([module])
    while pending:
        current = pending.popleft()
        if current in seen:
            continue
        seen.add(current)
        if is_replicated(current):
            continue
        pending.extendleft(reversed(list(current.children())))
        yield current


def is_replicated(module: nn.Module) -> bool:
    """Whether torch's composable `replicate` has been applied to `module`."""
    return "replicate" in composed_apis(module)

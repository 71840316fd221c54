"""`FullyShardedDataParallel`: constructor, forward, `summon_full_params`, `no_sync`, clipping."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    MixedPrecision,
    ShardingStrategy,
)

from impl.device import handle_for
from impl.fsdp.build.construct import (
    UnitSettings,
    arguments_for_nested,
    build_state,
    check_wrappable,
)
from impl.fsdp.build.groups import ProcessGroupType, resolve_groups
from impl.fsdp.build.ignored import check_all_flattened, resolve_ignored
from impl.fsdp.build.materialize import ParamInitFn, choose_device_type
from impl.fsdp.build.wrapping import AutoWrapPolicy, auto_wrap
from impl.fsdp.checkpoint import state_dict
from impl.fsdp.checkpoint.optim_api import OptimStateDictMethods
from impl.fsdp.checkpoint.state_dict_type import StateDictTypeMethods
from impl.fsdp.checkpoint.tensor_parallel import transform_for
from impl.fsdp.common import (
    FSDP_PREFIX,
    FSDP_WRAPPED_MODULE,
    HYBRID_STRATEGIES,
    TrainingState,
    span,
)
from impl.fsdp.flat_param.handle import FlatParamHandle
from impl.fsdp.step import forward, unshard_params
from impl.fsdp.step.backward import ensure_ready
from impl.fsdp.step.grad_norm import clip_grad_norm
from impl.fsdp.step.lazy_init import lazy_init, reset_lazy_init
from impl.fsdp.step.state import STATE_ATTRIBUTE, FSDPState, states_in
from impl.fsdp.step.unshard_params import SummonOptions
from impl.torch_private import mark_for_compiler


class FullyShardedDataParallel(StateDictTypeMethods, OptimStateDictMethods, nn.Module):
    """Shards the parameters, gradients and optimizer state of a module across ranks.

    Signature, defaults and behaviour are those of
    `torch.distributed.fsdp.FullyShardedDataParallel` (torch 2.13), and its configuration classes
    and wrap policies are taken as they are. It runs on CPU as well as on accelerators, with any
    backend. Where torch computes silently wrong results, this class does not follow; the places
    are marked in the sources.

    `isinstance(model, torch.distributed.fsdp.FullyShardedDataParallel)` is False, on purpose: torch
    functions that look for its class go on to its private state, which is not here. That concerns
    `torch.distributed.checkpoint.state_dict` (`get_state_dict` and the like), which raise an error
    for this class. Use `state_dict_type` with `state_dict`, `optim_state_dict` and
    `optim_state_dict_to_load` instead; `torch.distributed.checkpoint.save` and `load` take what
    they return.

    Args:
        module: the module to wrap. Build the optimizer afterwards.
        process_group: the ranks to shard over (None: all). For hybrid sharding a pair: the ranks to
            shard over and the ranks to replicate over.
        sharding_strategy: what is sharded and when it is freed; None means `FULL_SHARD`.
        cpu_offload: keep shards, gradients and the optimizer step on the host.
        auto_wrap_policy: which submodules to wrap as instances of their own.
        backward_prefetch: whether and when the next unit is gathered in the backward pass.
        mixed_precision: dtypes of computation, reduction and buffers.
        ignored_modules: modules whose parameters stay as they are. Use `ignored_states`.
        param_init_fn: initialises the parameters of one module that is on the meta device.
        device_id: the device to move `module` to and to compute on.
        sync_module_states: broadcast parameters and buffers from rank 0 of the group first.
        forward_prefetch: gather the next unit before the forward of the current one; the order of
            the first iteration is taken for all.
        limit_all_gathers: keep the host from running more than two gathers ahead of the device.
        use_orig_params: keep the original parameters (sharded, one-dimensional) as the module's
            parameters, instead of one flat parameter.
        ignored_states: parameters, or modules, that stay as they are.
        device_mesh: instead of `process_group`; one dimension to shard over, or two to replicate
            and to shard over. State dicts then hold `DTensor`s.

    Raises:
        ValueError: for arguments that contradict each other, parameters that cannot share a flat
            parameter, and a module that is wrapped already.
        RuntimeError: for parameters on several devices.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: ProcessGroupType = None,
        sharding_strategy: ShardingStrategy | None = None,
        cpu_offload: CPUOffload | None = None,
        auto_wrap_policy: AutoWrapPolicy | None = None,
        backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE,
        mixed_precision: MixedPrecision | None = None,
        ignored_modules: Iterable[nn.Module] | None = None,
        param_init_fn: ParamInitFn | None = None,
        device_id: int | torch.device | None = None,
        sync_module_states: bool = False,
        forward_prefetch: bool = False,
        limit_all_gathers: bool = True,
        use_orig_params: bool = False,
        ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None = None,
        device_mesh: DeviceMesh | None = None,
    ) -> None:
        super().__init__()
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            warnings.warn(
                "FSDP will not all-gather parameters for containers that do not implement "
                f"forward: {module}",
                stacklevel=2,
            )
        check_wrappable(module)
        settings = UnitSettings(
            sharding_strategy=sharding_strategy,
            cpu_offload=cpu_offload,
            backward_prefetch=backward_prefetch,
            mixed_precision=mixed_precision,
            param_init_fn=param_init_fn,
            device_id=device_id,
            sync_module_states=sync_module_states,
            forward_prefetch=forward_prefetch,
            limit_all_gathers=limit_all_gathers,
            use_orig_params=use_orig_params,
            device_mesh=device_mesh,
        )
        ignored = resolve_ignored(module, ignored_modules, ignored_states)
        mark_for_compiler(
            (part for part in module.modules() if part not in ignored.modules),
            use_orig_params=use_orig_params,
            package="impl.fsdp",
        )
        kind = choose_device_type(module, ignored, device_id).type
        device_handle = handle_for(torch.device(kind))
        groups = resolve_groups(
            process_group,
            device_mesh,
            sharding_strategy,
            device_handle,
            has_policy=auto_wrap_policy is not None,
        )
        if auto_wrap_policy is not None:
            kwargs = arguments_for_nested(settings, process_group, groups, ignored)
            auto_wrap(module, auto_wrap_policy, ignored, kwargs, FullyShardedDataParallel)
        state = build_state(
            self, module, groups, ignored, device_handle, settings, transform_for(device_mesh)
        )
        self.__dict__[STATE_ATTRIBUTE] = state
        self._fsdp_wrapped_module = module
        if not use_orig_params:
            check_all_flattened(self, ignored.params)
            unshard_params.register_flat_param(state)
        state_dict.register_hooks(self)

    # The wrapped module

    @property
    def module(self) -> nn.Module:
        """The wrapped module, without an activation checkpointing wrapper around it."""
        return self._state.innermost_module

    def __getattr__(self, name: str) -> Any:
        """Attributes that the wrapper lacks are those of the wrapped module."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == FSDP_WRAPPED_MODULE:
                raise
            return getattr(self._fsdp_wrapped_module, name)

    def __getitem__(self, key: int) -> Any:
        """Indexing goes to the wrapped module, which may be an `nn.Sequential`."""
        wrapped: Any = self._fsdp_wrapped_module
        return wrapped[key]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the wrapped module's forward with unsharded parameters."""
        state = self._state
        with span("forward"):
            args, kwargs = forward.root_pre_forward(state, args, kwargs)
            try:
                args, kwargs = forward.pre_forward(state, args, kwargs)
                output = self._fsdp_wrapped_module(*args, **kwargs)
            except BaseException:
                forward.abandon(state)
                raise
            return forward.post_forward(state, output)

    # What is inside

    @property
    def _state(self) -> FSDPState:
        state: FSDPState = self.__dict__[STATE_ATTRIBUTE]
        return state

    @property
    def _handle(self) -> FlatParamHandle | None:
        return self._state.handle

    @property
    def _flat_param(self) -> nn.Parameter | None:
        handle = self._state.handle
        return handle.flat_param if handle is not None else None

    @property
    def _has_params(self) -> bool:
        return self._state.handle is not None

    @property
    def params(self) -> list[nn.Parameter]:
        """The flat parameter of this instance, nested ones not included; none if it has none."""
        handle = self._state.handle
        return [handle.flat_param] if handle is not None else []

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The ranks that share this instance's flat parameter."""
        return self._state.process_group

    @property
    def rank(self) -> int:
        return self._state.rank

    @property
    def world_size(self) -> int:
        return self._state.world_size

    @property
    def compute_device(self) -> torch.device:
        return self._state.compute_device

    @property
    def mixed_precision(self) -> MixedPrecision:
        return self._state.mixed_precision

    @property
    def cpu_offload(self) -> CPUOffload:
        return self._state.cpu_offload

    @property
    def limit_all_gathers(self) -> bool:
        return self._state.limit_all_gathers

    @limit_all_gathers.setter
    def limit_all_gathers(self, value: bool) -> None:
        self._state.limit_all_gathers = value

    @property
    def training_state(self) -> TrainingState:
        return self._state.training_state

    @property
    def sharding_strategy(self) -> ShardingStrategy:
        """The strategy in use; `NO_SHARD` if there is only one rank to shard over.

        Assigning another one raises RuntimeError: the flat parameter is sharded for this one.
        """
        return self._state.sharding_strategy

    @sharding_strategy.setter
    def sharding_strategy(self, strategy: ShardingStrategy) -> None:
        if strategy != self._state.sharding_strategy:
            raise RuntimeError(
                f"The sharding strategy of an FSDP instance cannot change from "
                f"{self._state.sharding_strategy} to {strategy}: its parameters are sharded. Save "
                "a state dict and wrap a new module."
            )

    @property
    def backward_prefetch(self) -> BackwardPrefetch | None:
        return self._state.backward_prefetch

    @backward_prefetch.setter
    def backward_prefetch(self, value: BackwardPrefetch | None) -> None:
        self._state.backward_prefetch = value

    @property
    def forward_prefetch(self) -> bool:
        return self._state.forward_prefetch

    @forward_prefetch.setter
    def forward_prefetch(self, value: bool) -> None:
        self._state.forward_prefetch = value

    def check_is_root(self) -> bool:
        """Whether this instance is the root; initialises lazily, which decides it."""
        lazy_init(self._state)
        return bool(self._state.is_root)

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[FullyShardedDataParallel]:
        """The instances in the tree of `module`, itself included, or only the roots."""
        states = states_in(module)
        if root_only:
            for state in states:
                lazy_init(state)
            states = [state for state in states if state.is_root]
        return [state.wrapper for state in states]  # type: ignore[misc]  # what we put there

    def _fqn_modifiers(self) -> dict[str, str]:
        """Asked by `torch.distributed.checkpoint.state_dict` how names differ from attributes.

        It would otherwise take this rank's shards of optimizer state for the whole, silently.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            "torch.distributed.checkpoint.state_dict (get_state_dict, set_state_dict and the like) "
            "knows only torch's own FullyShardedDataParallel. Use FullyShardedDataParallel."
            "state_dict_type with state_dict(), optim_state_dict() and optim_state_dict_to_load(); "
            "torch.distributed.checkpoint.save and load take what they return."
        )

    # Full parameters

    @staticmethod
    @contextlib.contextmanager
    def summon_full_params(
        module: nn.Module,
        recurse: bool = True,
        writeback: bool = True,
        rank0_only: bool = False,
        offload_to_cpu: bool = False,
        with_grads: bool = False,
    ) -> Generator[None, None, None]:
        """Show the full parameters of all instances in `module` inside the context.

        A collective: every rank enters and leaves. Not inside a forward or backward, which in turn
        may not run inside the context.

        Args:
            recurse: also instances below `module`.
            writeback: keep changes; each rank keeps those to its own shard. Without, changes are
                lost, except with `NO_SHARD`.
            rank0_only: only rank 0 of the group sees full parameters; without `writeback`.
            offload_to_cpu: show them on CPU, to save device memory.
            with_grads: show full gradients too (with `use_orig_params=True`).

        Raises:
            NotImplementedError: for combinations that torch rejects too.
            AssertionError: inside a forward, a backward, or another such context.
        """
        options = SummonOptions(writeback, rank0_only, offload_to_cpu, with_grads)
        with unshard_params.summon(module, recurse=recurse, options=options):
            yield

    def apply(self, fn: Callable[[nn.Module], None]) -> FullyShardedDataParallel:
        """`nn.Module.apply` with full parameters, such as for initialising them."""
        state = self._state
        was_uninitialized = state.is_root is None
        ensure_ready(state)
        state.require(TrainingState.IDLE)
        # Each nested instance summons its own parameters when its turn comes.
        with unshard_params.summon_one(state, SummonOptions(writeback=True)):
            super().apply(fn)
        if was_uninitialized and state.is_root:
            # This instance may not be the root in the end.
            for other in states_in(self):
                reset_lazy_init(other)
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """`to()`, `cuda()`, `half()`: apply to the flat parameters, which own the storage."""
        state = self._state
        context = (
            unshard_params.flat_params_exposed(state)
            if state.use_orig_params
            else contextlib.nullcontext()
        )
        with context:
            nn.Module._apply(self, fn, recurse)
            for other in states_in(self):
                unshard_params.follow_flat_param(other)
        return self

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """Buffers; inside `summon_full_params` without the wrappers' prefixes."""
        for name, buffer in super().named_buffers(*args, **kwargs):
            yield self._user_name(name), buffer

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters; inside `summon_full_params` without the wrappers' prefixes."""
        for name, param in super().named_parameters(*args, **kwargs):
            yield self._user_name(name), param

    def _user_name(self, name: str) -> str:
        if self._state.training_state == TrainingState.SUMMON_FULL_PARAMS:
            return name.replace(FSDP_PREFIX, "")
        return name

    # Gradients

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients, also those of parameters that are not shown at present.

        With `SHARD_GRAD_OP` and original parameters, modules show plain tensors from a forward to
        its backward. (torch 2.13 clears nothing then.)
        """
        hidden = [param for state in states_in(self) for param in state.hidden_params()]
        shown = [param for param in self.parameters() if param.is_leaf]
        nn.ParameterList([*shown, *hidden]).zero_grad(set_to_none)

    @contextlib.contextmanager
    def no_sync(self) -> Generator[None, None, None]:
        """Accumulate unsharded gradients without reducing them, until a backward outside.

        Costs the memory of the full gradients.

        Raises:
            RuntimeError: on an instance that is not the root.
        """
        state = self._state
        ensure_ready(state)
        if not state.is_root:
            raise RuntimeError(
                "`no_sync()` on inner FSDP instances is not supported. Please call `no_sync()` on "
                "root FSDP module."
            )
        state.require(TrainingState.IDLE)
        previous = [(other, other.sync_gradients) for other in state.shared.states]
        for other, _ in previous:
            other.sync_gradients = False
        try:
            yield
        finally:
            for other, value in previous:
                other.sync_gradients = value

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float | int, norm_type: float | int = 2.0) -> Tensor:
        """Clip the norm of all gradients, taken as one vector across all shards.

        A collective. Use it instead of `torch.nn.utils.clip_grad_norm_` if anything is sharded.

        Args:
            norm_type: the p of the norm; `inf` for the largest absolute value.

        Returns the norm before clipping, in the widest dtype of the gradients.

        Raises:
            RuntimeError: on an instance that is not the root.
        """
        state = self._state
        ensure_ready(state)
        if not state.is_root:
            raise RuntimeError(
                "`clip_grad_norm_()` should only be called on the root FSDP instance"
            )
        state.require(TrainingState.IDLE)
        return clip_grad_norm(state, float(max_norm), float(norm_type))

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Let `hook` reduce gradients instead of the default averaging, in all instances.

        Called as `hook(state, unsharded_grad, shard)`, to fill `shard`; with `NO_SHARD` as
        `hook(state, grad)`, to reduce `grad` in place.

        Raises:
            AssertionError: not on the root, for hybrid strategies, or if there is a hook already.
            ValueError: if `hook` is not callable.
        """
        if not self.check_is_root():
            raise AssertionError("register_comm_hook can only be called on a root instance.")
        states = states_in(self)
        for other in states:
            if other.sharding_strategy in HYBRID_STRATEGIES:
                raise AssertionError(
                    "Communication hook is not supported for hybrid strategies: "
                    f"{other.sharding_strategy}"
                )
            if other.comm_hook is not None:
                raise AssertionError("A communication hook is already registered")
        if not callable(hook):
            raise ValueError(f"The communication hook must be callable but got {hook}")
        for other in states:
            other.comm_hook, other.comm_hook_state = hook, state

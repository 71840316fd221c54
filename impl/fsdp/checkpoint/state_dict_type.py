"""`set_state_dict_type` and `state_dict_type`: full, sharded or local state dicts; configs."""

from __future__ import annotations

import contextlib
from collections.abc import Generator

from torch import nn
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    OptimStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)

from impl.fsdp.step.state import FSDPState, states_in

_MODEL_CONFIGS: dict[StateDictType, type[StateDictConfig]] = {
    StateDictType.FULL_STATE_DICT: FullStateDictConfig,
    StateDictType.LOCAL_STATE_DICT: LocalStateDictConfig,
    StateDictType.SHARDED_STATE_DICT: ShardedStateDictConfig,
}
_OPTIM_CONFIGS: dict[StateDictType, type[OptimStateDictConfig]] = {
    StateDictType.FULL_STATE_DICT: FullOptimStateDictConfig,
    StateDictType.LOCAL_STATE_DICT: LocalOptimStateDictConfig,
    StateDictType.SHARDED_STATE_DICT: ShardedOptimStateDictConfig,
}


def require_no_device_mesh(state: FSDPState) -> None:
    """Raise RuntimeError if a local state dict is wanted of an instance with a device mesh."""
    if state.device_mesh is not None and state.state_dict_type == StateDictType.LOCAL_STATE_DICT:
        raise RuntimeError(
            "Found state_dict_type LOCAL_STATE_DICT. DeviceMesh is not compatible with "
            "LOCAL_STATE_DICT. Please set state_dict_type to SHARDED_STATE_DICT to get DTensor "
            "state_dict."
        )


def uses_dtensor(state: FSDPState) -> bool:
    """Whether values of sharded state dicts are `DTensor`s: if there is a mesh to place them on."""
    return state.device_mesh is not None or bool(
        getattr(state.state_dict_config, "_use_dtensor", False)
    )


class StateDictTypeMethods:
    """The methods of `FullyShardedDataParallel` that choose the kind of state dict."""

    @staticmethod
    def set_state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> StateDictSettings:
        """Set the kind of state dict for all instances in `module`; returns the previous settings.

        Raises:
            RuntimeError: if a config is not of the class that belongs to `state_dict_type`.
            AssertionError: if instances have different settings at present.
        """
        model_class, optim_class = _MODEL_CONFIGS[state_dict_type], _OPTIM_CONFIGS[state_dict_type]
        model_config = model_class() if state_dict_config is None else state_dict_config
        optim_config = optim_class() if optim_state_dict_config is None else optim_state_dict_config
        if type(model_config) is not model_class:
            raise RuntimeError(
                f"Expected state_dict_config of type {model_class} but got {type(model_config)}"
            )
        if type(optim_config) is not optim_class:
            raise RuntimeError(
                f"Expected optim_state_dict_config of type {optim_class} but got "
                f"{type(optim_config)}"
            )
        states = states_in(module)
        for state in states[1:]:
            first = states[0]
            if state.state_dict_type != first.state_dict_type:
                raise AssertionError("All FSDP modules should have the same state_dict_type.")
            if type(state.state_dict_config) is not type(first.state_dict_config):
                raise AssertionError(
                    "All FSDP modules must have the same type of state_dict_config."
                )
            if type(state.optim_state_dict_config) is not type(first.optim_state_dict_config):
                raise AssertionError(
                    "All FSDP modules must have the same type of optim_state_dict_config."
                )
        previous = StateDictSettings(
            *(
                (
                    states[0].state_dict_type,
                    states[0].state_dict_config,
                    states[0].optim_state_dict_config,
                )
                if states
                # Nothing to set, and nothing that restoring would change.
                else (state_dict_type, model_config, optim_config)
            )
        )
        for state in states:
            state.state_dict_type = state_dict_type
            state.state_dict_config = model_config
            state.optim_state_dict_config = optim_config
        return previous

    @staticmethod
    def get_state_dict_type(module: nn.Module) -> StateDictSettings:
        """The settings of the instances in `module`.

        Raises:
            AssertionError: if they differ, or if there is no instance.
            RuntimeError: for a local state dict with a device mesh.
        """
        settings: StateDictSettings | None = None
        for state in states_in(module):
            require_no_device_mesh(state)
            if state.device_mesh is not None:
                state.optim_state_dict_config._use_dtensor = True  # type: ignore[attr-defined]  # as torch marks it
            own = StateDictSettings(
                state.state_dict_type, state.state_dict_config, state.optim_state_dict_config
            )
            if settings is not None and settings != own:
                raise AssertionError(
                    "All FSDP modules must have the same state dict settings."
                    f"Got {own} and {settings}."
                )
            settings = own
        if settings is None:
            raise AssertionError(f"There is no FSDP instance in {type(module).__name__}")
        return settings

    @staticmethod
    @contextlib.contextmanager
    def state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> Generator[None, None, None]:
        """`set_state_dict_type` inside the context, the previous settings afterwards."""
        set_type = StateDictTypeMethods.set_state_dict_type
        previous = set_type(module, state_dict_type, state_dict_config, optim_state_dict_config)
        try:
            yield
        finally:
            set_type(
                module,
                previous.state_dict_type,
                previous.state_dict_config,
                previous.optim_state_dict_config,
            )

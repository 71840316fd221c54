"""The methods of `FullyShardedDataParallel` for optimizer state dicts."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import OptimStateKeyType, StateDictType

from impl.fsdp.checkpoint.optim_load import load_optim_state
from impl.fsdp.checkpoint.optim_names import OptimInput, ParamKey, params_of_input
from impl.fsdp.checkpoint.optim_save import SaveOptions, save_optim_state
from impl.fsdp.checkpoint.state_dict_type import StateDictTypeMethods
from impl.fsdp.common import clean_tensor_name, named_parameters_with_duplicates
from impl.fsdp.step.state import states_in

OptimStateDict = dict[str, Any]


class OptimStateDictMethods:
    """Optimizer state dicts: `optim_state_dict` and `optim_state_dict_to_load`; older forms below.

    State dicts made here have the original parameters' names as keys and their shapes as values, so
    another wrapping, another world size or no FSDP at all can load them.
    """

    @staticmethod
    def optim_state_dict(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_state_dict: OptimStateDict | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> OptimStateDict:
        """The optimizer's state as `set_state_dict_type` asks for it: full, or sharded by rows.

        A collective.

        Args:
            model: contains the FSDP instances; need not be one.
            optim: the optimizer of the model's parameters.
            optim_state_dict: its `state_dict()`, if there is a reason not to take that.
            group: the ranks among which `rank0_only` counts (None: all).
        """
        settings = StateDictTypeMethods.get_state_dict_type(model)
        config = settings.optim_state_dict_config
        is_full = settings.state_dict_type == StateDictType.FULL_STATE_DICT
        return save_optim_state(
            model,
            optim,
            optim.state_dict() if optim_state_dict is None else optim_state_dict,
            None,
            group,
            SaveOptions(
                rank0_only=is_full and getattr(config, "rank0_only", False),
                shard=not is_full,
                offload_to_cpu=config.offload_to_cpu,
            ),
            use_orig_params=_uses_orig_params(model),
        )

    @staticmethod
    def optim_state_dict_to_load(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_state_dict: OptimStateDict,
        is_named_optimizer: bool = False,
        load_directly: bool = False,
        group: dist.ProcessGroup | None = None,
    ) -> OptimStateDict:
        """The opposite of `optim_state_dict`: what `optim.load_state_dict` takes on this rank.

        Args:
            is_named_optimizer: `optim` has names as keys (torchrec's, `_NamedOptimizer`).
            load_directly: also load the result.
        """
        settings = StateDictTypeMethods.get_state_dict_type(model)
        is_full = settings.state_dict_type == StateDictType.FULL_STATE_DICT
        result = load_optim_state(
            optim_state_dict,
            model,
            optim,
            None,
            group,
            rank0_only=is_full and getattr(settings.optim_state_dict_config, "rank0_only", False),
            is_named_optimizer=is_named_optimizer,
            use_orig_params=_uses_orig_params(model),
        )
        if load_directly:
            optim.load_state_dict(result)
        return result

    # Older forms, which don't look at `set_state_dict_type`

    @staticmethod
    def full_optim_state_dict(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_input: OptimInput = None,
        rank0_only: bool = True,
        group: dist.ProcessGroup | None = None,
    ) -> OptimStateDict:
        """The full optimizer state on rank 0 (or all ranks), on CPU. A collective."""
        _warn_legacy("full_optim_state_dict", "optim_state_dict")
        _warn_optim_input(optim_input)
        return save_optim_state(
            model,
            _optimizer_unless_input(optim, optim_input),
            optim.state_dict(),
            optim_input,
            group,
            SaveOptions(rank0_only=rank0_only, shard=False, offload_to_cpu=True),
            use_orig_params=_uses_orig_params(model),
        )

    @staticmethod
    def sharded_optim_state_dict(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        group: dist.ProcessGroup | None = None,
    ) -> OptimStateDict:
        """The optimizer state sharded by rows, on CPU. A collective."""
        _warn_legacy("sharded_optim_state_dict", "optim_state_dict")
        return save_optim_state(
            model,
            optim,
            optim.state_dict(),
            None,
            group,
            SaveOptions(rank0_only=False, shard=True, offload_to_cpu=True),
            use_orig_params=_uses_orig_params(model),
        )

    @staticmethod
    def shard_full_optim_state_dict(
        full_optim_state_dict: OptimStateDict,
        model: nn.Module,
        optim_input: OptimInput = None,
        optim: torch.optim.Optimizer | None = None,
    ) -> OptimStateDict:
        """This rank's part of a full state dict that every rank has. No communication."""
        _warn_legacy("shard_full_optim_state_dict", "optim_state_dict_to_load")
        _warn_optim_input(optim_input)
        return _load(full_optim_state_dict, model, optim, optim_input, None, rank0_only=False)

    @staticmethod
    def flatten_sharded_optim_state_dict(
        sharded_optim_state_dict: OptimStateDict,
        model: nn.Module,
        optim: torch.optim.Optimizer,
    ) -> OptimStateDict:
        """This rank's part of a state dict of `sharded_optim_state_dict`. A collective."""
        _warn_legacy("flatten_sharded_optim_state_dict", "optim_state_dict_to_load")
        return _load(sharded_optim_state_dict, model, optim, None, None, rank0_only=False)

    @staticmethod
    def scatter_full_optim_state_dict(
        full_optim_state_dict: OptimStateDict | None,
        model: nn.Module,
        optim_input: OptimInput = None,
        optim: torch.optim.Optimizer | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> OptimStateDict:
        """This rank's part of a full state dict that rank 0 has. A collective."""
        _warn_legacy("scatter_full_optim_state_dict", "optim_state_dict_to_load")
        _warn_optim_input(optim_input)
        return _load(full_optim_state_dict or {}, model, optim, optim_input, group, rank0_only=True)

    @staticmethod
    def rekey_optim_state_dict(
        optim_state_dict: OptimStateDict,
        optim_state_key_type: OptimStateKeyType,
        model: nn.Module,
        optim_input: OptimInput = None,
        optim: torch.optim.Optimizer | None = None,
    ) -> OptimStateDict:
        """The state dict with the other kind of keys, for a `model` without FSDP.

        Names to numbers, to load what FSDP saved without FSDP; numbers to names, for the opposite.

        Raises:
            ValueError: if the state dict has keys of both kinds.
        """
        _warn_optim_input(optim_input)
        if optim_state_key_type not in (OptimStateKeyType.PARAM_NAME, OptimStateKeyType.PARAM_ID):
            raise AssertionError(
                "Expected optim_state_key_type to be PARAM_NAME or PARAM_ID, got "
                f"{optim_state_key_type}"
            )
        kinds = {type(key) for key in optim_state_dict["state"]}
        if len(kinds) > 1 and kinds & {str, int}:
            raise ValueError(f"Invalid parameter keys: {optim_state_dict['state'].keys()}")
        to_names = optim_state_key_type == OptimStateKeyType.PARAM_NAME
        if kinds <= {str if to_names else int}:
            return optim_state_dict
        names = _unique_names(model)
        params = (
            params_of_input(model, optim_input)
            if optim is None or optim_input is not None
            else dict(enumerate(p for group in optim.param_groups for p in group["params"]))
        )
        new_key: dict[Any, ParamKey] = {}
        for key, param in params.items():
            old, new = (key, names[param]) if to_names else (names[param], key)
            new_key[old] = new
        return {
            "state": {new_key[key]: value for key, value in optim_state_dict["state"].items()},
            "param_groups": [
                {
                    **copy.deepcopy({k: v for k, v in group.items() if k != "params"}),
                    "params": sorted(
                        (new_key[key] for key in group["params"]),
                        key=lambda k: (isinstance(k, str), k),
                    ),
                }
                for group in optim_state_dict["param_groups"]
            ],
        }


def _uses_orig_params(model: nn.Module) -> bool:
    values = {state.use_orig_params for state in states_in(model)}
    if not values:
        raise AssertionError(f"There is no FSDP instance in {type(model).__name__}")
    if len(values) > 1:
        raise AssertionError("Not all FSDP modules have the same _use_orig_params value")
    return values.pop()


def _optimizer_unless_input(
    optim: torch.optim.Optimizer | None, optim_input: OptimInput
) -> torch.optim.Optimizer | None:
    return optim if optim_input is None else None


def _load(
    optim_state_dict: OptimStateDict,
    model: nn.Module,
    optim: torch.optim.Optimizer | None,
    optim_input: OptimInput,
    group: dist.ProcessGroup | None,
    *,
    rank0_only: bool,
) -> OptimStateDict:
    return load_optim_state(
        optim_state_dict,
        model,
        _optimizer_unless_input(optim, optim_input),
        optim_input,
        group,
        rank0_only=rank0_only,
        is_named_optimizer=False,
        use_orig_params=_uses_orig_params(model),
    )


def _unique_names(model: nn.Module) -> dict[nn.Parameter, str]:
    """The first name of each parameter of a model without FSDP."""
    names: dict[nn.Parameter, str] = {}
    for name, param in named_parameters_with_duplicates(model):
        names.setdefault(param, clean_tensor_name(name))
    return names


def _warn_optim_input(optim_input: OptimInput) -> None:
    if optim_input is not None:
        warnings.warn(
            "The `optim_input` argument is deprecated and will be removed after PyTorch 1.13. You "
            "may remove it from your code without changing its functionality.",
            FutureWarning,
            stacklevel=3,
        )


def _warn_legacy(current: str, new: str) -> None:
    warnings.warn(
        f"``FullyShardedDataParallel.{current}``is being deprecated and is replaced by "
        f"``FullyShardedDataParallel.{new}``. ``FullyShardedDataParallel.{current}`` may be "
        "removed after PyTorch 2.2.",
        FutureWarning,
        stacklevel=3,
    )

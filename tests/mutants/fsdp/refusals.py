"""Faults of what FSDP refuses: it goes on, or speaks of something else."""

from __future__ import annotations

import warnings
from typing import Any

import torch.distributed as dist

from impl.fsdp import api
from impl.fsdp.build import groups, wrapping
from impl.fsdp.checkpoint import optim_load, optim_save
from impl.fsdp.flat_param import handle
from impl.fsdp.step import lazy_init
from impl.fsdp.step.grad_norm import clip_grad_norm
from tests.mutants.fsdp.kit import Swapped, nothing
from tests.mutants.kit import breaks

# The constructor


def _without_the_mesh(right: Any) -> Any:
    def wrong(group: Any, mesh: Any, *args: Any, **kwargs: Any) -> Any:
        return right(group, None if group is not None else mesh, *args, **kwargs)

    return wrong


@breaks("fsdp/mesh-and-group", says="was to raise")
class PrefersTheGroup(Swapped):
    swaps = ((api, "resolve_groups", _without_the_mesh),)


def _over_everybody(right: Any) -> Any:
    def wrong(group: Any, mesh: Any, *args: Any, **kwargs: Any) -> Any:
        is_pair = isinstance(group, tuple) or (mesh is not None and mesh.ndim == 2)
        return (
            right(group, mesh, *args, **kwargs)
            if is_pair
            else right(None, None, None, *args[1:], **kwargs)
        )

    return wrong


@breaks("fsdp/hybrid-needs-groups", says="was to raise")
class ShardsOverEverybodyWithoutAPair(Swapped):
    """Hybrid sharding without a pair of groups becomes plain sharding."""

    swaps = ((api, "resolve_groups", _over_everybody),)


@breaks("fsdp/auto-wrapped-twice", says="Linear is already wrapped")
class WrapsWhatIsWrapped(Swapped):
    swaps = ((wrapping, "_check_not_wrapped", nothing),)


@breaks("fsdp/mixed-dtypes", says="was to raise")
class FlattensAnyDtypes(Swapped):
    """The flat parameter has the dtype that all can be promoted to."""

    swaps = ((handle, "validate_params", nothing),)


@breaks("fsdp/mixed-requires-grad", says="was to raise")
class TrainsFrozenNeighbours(Swapped):
    """One flat parameter, which requires a gradient if any of its parts does."""

    swaps = (
        (
            handle,
            "validate_params",
            lambda right: lambda params, use_orig_params: right(params, use_orig_params=True),
        ),
    )


@breaks("fsdp/root-becomes-part", says="was to raise")
class TakesRootsAsParts(Swapped):
    swaps = ((lazy_init, "check", nothing),)


def _silent(right: Any) -> Any:
    def wrong(self: Any, *args: Any, **kwargs: Any) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            right(self, *args, **kwargs)

    return wrong


@breaks("fsdp/container-without-forward", says="warnings: ")
class ConstructsInSilence(Swapped):
    swaps = ((api.FullyShardedDataParallel, "__init__", _silent),)


@breaks("fsdp/without-default-group", says="was to raise")
class TakesAnyDefaultGroup(Swapped):
    """`None` goes on as if it were the default group."""

    swaps = ((groups, "_default_group", lambda _: lambda: dist.group.WORLD),)


# Full parameters, norms and no_sync


@breaks("fsdp/norm-of-inner-unit", says="was to raise")
class ClipsFromInside(Swapped):
    swaps = (
        (
            api.FullyShardedDataParallel,
            "clip_grad_norm_",
            lambda _: (
                lambda self, max_norm, norm_type=2.0: clip_grad_norm(
                    self._state, max_norm, norm_type
                )
            ),
        ),
    )


# Optimizer state


def _without_a_word(right: Any) -> Any:
    def wrong(*args: Any, **kwargs: Any) -> Any:
        try:
            return right(*args, **kwargs)
        except RuntimeError:
            return [], {}

    return wrong


@breaks("fsdp/optimizer-state-missing", says="was to raise")
class SavesWhatAllHave(Swapped):
    swaps = ((optim_save, "agree_on_keys", _without_a_word),)


def _of_known_names(right: Any) -> Any:
    def wrong(state: Any, param_groups: Any, params: Any, names: Any) -> Any:
        known = {name for found in names.names_of.values() for name in found}
        kept = [
            {**group, "params": [name for name in group["params"] if name in known]}
            for group in param_groups
        ]
        return right(state, kept, params, names)

    return wrong


@breaks("fsdp/optimizer-state-of-nobody", says="was to raise")
class DropsUnknownNames(Swapped):
    swaps = ((optim_load, "_rekey", _of_known_names),)


@breaks("fsdp/optimizer-state-by-number", says="was to raise")
class TakesNumbersForTheOptimizersOwn(Swapped):
    swaps = ((optim_load, "_refuse_numbers", nothing),)


def _with_zeros(right: Any) -> Any:
    def wrong(unit: Any, name: str, values: list[Any]) -> Any:
        shapes = [param.shape for param in unit.handle.metadata.params]
        fitting = [
            value if value is None or value.shape == shape else value.new_zeros(shape)
            for value, shape in zip(values, shapes, strict=True)
        ]
        return right(unit, name, fitting)

    return wrong


def _after_forgetting(right: Any) -> Any:
    def wrong(model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        for state in optimizer.state.values():
            state["exp_avg"].zero_()
        return right(model, optimizer, *args, **kwargs)

    return staticmethod(wrong)


@breaks("fsdp/optimizer-state-of-wrong-shape", says="the optimizer was changed")
class ForgetsBeforeItLoads(Swapped):
    """The state that an optimizer has is dropped before the new one was looked at."""

    swaps = ((api.FullyShardedDataParallel, "optim_state_dict_to_load", _after_forgetting),)


@breaks("fsdp/optimizer-state-of-wrong-shape", says="was to raise")
class BeginsAnewWhereShapesDiffer(Swapped):
    swaps = ((optim_load, "_flatten_tensors", _with_zeros),)

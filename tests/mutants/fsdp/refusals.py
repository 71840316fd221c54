"""Mutants of conformance/spec/fsdp/refusals.py."""

from __future__ import annotations

import warnings
from typing import Any

import torch.distributed as dist

from impl.fsdp import api
from impl.fsdp.build import construct as build
from impl.fsdp.build import groups, wrapping
from impl.fsdp.checkpoint import optim_load
from impl.fsdp.flat_param import handle
from impl.fsdp.step import lazy_init
from tests.mutants.fsdp.kit import Swapped, always, nothing
from tests.mutants.kit import breaks


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
class HybridWithoutGroupsIsPlainSharding(Swapped):
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


@breaks("fsdp/optimizer-state-by-number", says="was to raise")
class TakesNumbersForTheOptimizersOwn(Swapped):
    swaps = ((optim_load, "_refuse_numbers", nothing),)


@breaks("fsdp/homogeneous-settings", says="was to raise")
class TakesDifferentSettings(Swapped):
    swaps = ((lazy_init, "_check_homogeneous", nothing),)


@breaks("fsdp/wrapped-twice", says="was to raise")
class WrapsTwice(Swapped):
    swaps = ((build, "is_wrapped", always(False)),)


@breaks("fsdp/strategy-changes", says="was to raise")
class TakesAnotherStrategySilently(Swapped):
    """Setting another sharding_strategy raises no error, as in torch 2.13."""

    swaps = (
        (
            api.FullyShardedDataParallel,
            "sharding_strategy",
            lambda right: property(right.fget, lambda self, strategy: None),
        ),
    )


@breaks("fsdp/tied-across-units", says="was to raise")
class TakesParametersTiedAcrossUnits(Swapped):
    """A parameter in two units raises no error, as in torch 2.13."""

    swaps = ((build, "check_not_shared_with_nested", nothing),)


@breaks("fsdp/frozen-and-trained-by-name", says="are not in")
class NamesTheUnitsOwnParametersAlone(Swapped):
    swaps = (
        (
            wrapping,
            "_own_params",
            lambda _: (
                lambda module, prefix, visited: module.named_parameters(prefix, recurse=False)
            ),
        ),
    )

"""Mutants of conformance/spec/fsdp/wrapping.py."""

from __future__ import annotations

from typing import Any

from impl.fsdp.build import wrapping
from impl.fsdp.step import lazy_init
from tests.mutants.fsdp.kit import Swapped, nothing
from tests.mutants.kit import breaks


def _of_one_strategy(right: Any) -> Any:
    def wrong(root: Any, chosen: Any, wrap: Any) -> None:
        alike = {module: {**kwargs, "sharding_strategy": None} for module, kwargs in chosen.items()}
        right(root, alike, wrap)

    return wrong


@breaks("fsdp/wrap-policies", says="units: rank . is wrong")
class PoliciesChangeNoArguments(Swapped):
    """The arguments that CustomPolicy gives for a unit are ignored."""

    swaps = ((wrapping, "_wrap_chosen", _of_one_strategy),)


@breaks("fsdp/shared-module", says="the two names")
class WrapsASharedModuleInOnePlace(Swapped):
    """A module in two places is wrapped in only one of them, as in torch 2.13."""

    swaps = ((wrapping, "_children", lambda _: lambda module: list(module.named_children())),)


@breaks("fsdp/added-layer", says="added, silently")
class SaysNothingOfAddedLayers(Swapped):
    swaps = ((lazy_init, "_warn_of_added_parameters", nothing),)

"""Mutants of conformance/spec/fsdp/state_dict_types.py."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from impl.fsdp import api
from impl.fsdp.checkpoint import state_dict, state_dict_type
from tests.mutants.fsdp.kit import Swapped
from tests.mutants.kit import breaks


@breaks("fsdp/not-sharded-is-full", says="entries are")
class ReplicasAreSavedAsShards(Swapped):
    swaps = ((state_dict, "_kind", lambda _: lambda state: state.state_dict_type),)


def _asking_first(right: Any) -> Any:
    def wrong(state: Any) -> Any:
        state_dict_type.require_no_device_mesh(state)
        return right(state)

    return wrong


@breaks("fsdp/not-sharded-is-full", says="DeviceMesh is not compatible")
class ReplicasOnAMeshHaveNoLocalStateDict(Swapped):
    swaps = ((state_dict, "_kind", _asking_first),)


@breaks("fsdp/state-dict-types", says="types: rank . is wrong")
class OnlyTheRootHasAType(Swapped):
    swaps = ((state_dict_type, "states_in", lambda right: lambda module: right(module)[:1]),)


def _of_any_class(right: Any) -> Any:
    def wrong(module: Any, kind: Any, model: Any = None, optim: Any = None) -> Any:
        return right(module, kind)

    return staticmethod(wrong)


@breaks("fsdp/state-dict-config-of-another-type", says="said nothing")
class TakesAnyConfig(Swapped):
    swaps = ((state_dict_type.StateDictTypeMethods, "set_state_dict_type", _of_any_class),)


def _without_finally(_: Any) -> Any:
    @contextlib.contextmanager
    def wrong(module: Any, kind: Any, model: Any = None, optim: Any = None) -> Iterator[None]:
        cls = api.FullyShardedDataParallel
        before = cls.set_state_dict_type(module, kind, model, optim)
        yield
        cls.set_state_dict_type(
            module,
            before.state_dict_type,
            before.state_dict_config,
            before.optim_state_dict_config,
        )

    return staticmethod(wrong)


def _without_the_optimizers_config(_: Any) -> Any:
    @contextlib.contextmanager
    def wrong(module: Any, kind: Any, model: Any = None, optim: Any = None) -> Iterator[None]:
        cls = api.FullyShardedDataParallel
        before = cls.set_state_dict_type(module, kind, model, optim)
        try:
            yield
        finally:
            cls.set_state_dict_type(module, before.state_dict_type, before.state_dict_config)

    return staticmethod(wrong)


@breaks("fsdp/state-dict-configs-come-back", says="configs were")
class TheOptimizersConfigDoesNotComeBack(Swapped):
    swaps = (
        (
            state_dict_type.StateDictTypeMethods,
            "state_dict_type",
            _without_the_optimizers_config,
        ),
    )


@breaks("fsdp/state-dict-types-after-error", says="types: rank 0 is wrong")
class AnErrorKeepsTheStateDictType(Swapped):
    """The type that state_dict_type has set stays after an exception, as in torch 2.13."""

    swaps = ((state_dict_type.StateDictTypeMethods, "state_dict_type", _without_finally),)

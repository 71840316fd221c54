"""Faults of FSDP's state dicts as others see them: kinds, keys, what is loaded, what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from impl.fsdp import api
from impl.fsdp.checkpoint import optim_api, optim_load, optim_save, state_dict, state_dict_type
from impl.fsdp.flat_param import packing as flat_param
from tests.mutants.fsdp.kit import Swapped, nothing
from tests.mutants.kit import breaks

# What is saved


@breaks("fsdp/full-state-dict-hybrid", says=r"got \[\]")
class OnlyTheFirstOfANodeSaves(Swapped):
    swaps = (
        (
            state_dict,
            "_is_rank0_only",
            lambda right: lambda state: state.is_hybrid or right(state),
        ),
    )


def _without_copies(right: Any) -> Any:
    def wrong(state: Any, handle: Any, entries: Any, prefix: str) -> None:
        for key in state_dict.param_keys(handle):
            entries[prefix + key] = entries[prefix + key].detach()

    return wrong


@breaks("fsdp/full-state-dict-is-kept", says="is wrong")
class StateDictsAreViews(Swapped):
    """Entries view what is freed, and gathered again later."""

    swaps = ((state_dict, "_save_full", _without_copies),)


def _promised(right: Any) -> Any:
    def wrong(state: Any, handle: Any, entries: Any, prefix: str) -> None:
        right(state, handle, entries, prefix)
        if state.state_dict_config.offload_to_cpu:
            for key in state_dict.param_keys(handle):
                entries[prefix + key] = torch.zeros_like(entries[prefix + key])

    return wrong


@breaks("fsdp/full-state-dict-on-cpu", says="is wrong")
class OffloadedEntriesNeverArrive(Swapped):
    """Their memory is there, and nobody waits for the copies."""

    swaps = ((state_dict, "_save_full", _promised),)


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


def _dealt(world_size: int, rows: int) -> Tensor:
    """The rows in the order in which they are dealt out in turns."""
    return torch.cat([torch.arange(rank, rows, world_size) for rank in range(world_size)])


def _dealing(right: Any) -> Any:
    def wrong(value: Tensor, state: Any, **kwargs: Any) -> Any:
        return right(value[_dealt(state.world_size, value.shape[0])], state, **kwargs)

    return wrong


def _collecting(right: Any) -> Any:
    def wrong(value: Any, state: Any) -> Tensor:
        rows: Tensor = right(value, state)
        return rows[_dealt(state.world_size, rows.shape[0]).argsort()]

    return wrong


@breaks("fsdp/reshards", says="is wrong")
class DealsRowsInTurns(Swapped):
    """Which row is where depends on the number of ranks, and nothing says so."""

    swaps = (
        (state_dict, "shard_rows", _dealing),
        (state_dict, "unshard_rows", _collecting),
    )


def _reversed(right: Any) -> Any:
    return lambda chunk, *args: right(chunk.flip(0), *args)


def _reversed_again(right: Any) -> Any:
    def wrong(handle: Any, entries: Any, prefix: str) -> None:
        right(handle, entries, prefix)
        used = handle.local_chunk(entries[prefix + "_flat_param"])
        used.copy_(used.flip(0))

    return wrong


@breaks("fsdp/exchanges-local-with-torch", says="is wrong")
class ChunksAreSavedBackwards(Swapped):
    """And loaded so, so that its own state dicts come back."""

    swaps = (
        (state_dict, "sharded_tensor_from_flat_shard", _reversed),
        (state_dict, "_load_local", _reversed_again),
    )


# Kinds


@breaks("fsdp/mesh-has-no-local-state-dict", says="was to raise")
class SavesChunksOfAMesh(Swapped):
    swaps = ((state_dict, "require_no_device_mesh", nothing),)


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


# What is loaded


def _lost(right: Any) -> Any:
    return lambda state, options: right(state, replace(options, writeback=False))


@breaks("fsdp/loads-the-bare-state-dict", says="is wrong")
@breaks("fsdp/exchanges-with-ddp", says="is wrong")
@breaks("fsdp/outer-module", says="loading left another value")
class LoadedValuesAreLost(Swapped):
    """They get into the full parameters, and not into the shards."""

    swaps = ((state_dict, "_shown_in_full", _lost),)


def _never_strictly(right: Any) -> Any:
    def wrong(self: Any, entries: Any, strict: bool = True, assign: bool = False) -> Any:
        return right(self, entries, strict=False, assign=assign)

    return wrong


@breaks("fsdp/missing-key", says="said nothing")
@breaks("fsdp/unexpected-key", says="said nothing")
@breaks("fsdp/sharded-missing-key", says="was to raise")
class NeverLoadsStrictly(Swapped):
    swaps = ((api.FullyShardedDataParallel, "load_state_dict", _never_strictly),)


def _what_fits(right: Any) -> Any:
    def wrong(self: Any, entries: Any, strict: bool = True, assign: bool = False) -> Any:
        own = self.state_dict()
        fitting = {
            key: value
            for key, value in entries.items()
            if key not in own or value.shape == own[key].shape
        }
        return right(self, fitting, strict=strict, assign=assign)

    return wrong


@breaks("fsdp/wrong-shape", says=r'Missing key\(s\) in state_dict: "head.weight"')
class LeavesOutWhatDoesNotFit(Swapped):
    swaps = ((api.FullyShardedDataParallel, "load_state_dict", _what_fits),)


@breaks("fsdp/not-strict", says="what was told: rank . is wrong")
class TellsKeysWithTheWrappersNames(Swapped):
    swaps = ((state_dict, "clean_tensor_name", lambda _: lambda name: name),)


# Optimizers


@breaks("fsdp/optimizer-state-on-rank-0", says=r"\d\d entries")
class EveryRankGetsTheState(Swapped):
    swaps = (
        (
            optim_api,
            "SaveOptions",
            lambda right: lambda rank0_only, **options: right(rank0_only=False, **options),
        ),
    )


@breaks("fsdp/optimizer-state-of-units-and-the-bare-module", says="is wrong")
class ParametersOfAUnitShareTheirStep(Swapped):
    """As in torch 2.13: who loads it counts once for each of them."""

    swaps = ((optim_save, "_copied", lambda _: lambda state: state),)


def _of_all(right: Any) -> Any:
    def wrong(unit: Any, states: Any, options: Any) -> Any:
        return right(unit, {name: states.get(name, {}) for name in unit.names}, options)

    return wrong


@breaks("fsdp/frozen-have-no-state", says="names with state")
class FrozenParametersHaveEmptyState(Swapped):
    swaps = ((optim_save, "_gather_orig_states", _of_all),)


def _with_the_first_settings(right: Any) -> Any:
    def wrong(*args: Any) -> Any:
        loaded = right(*args)
        first = loaded["param_groups"][0]
        groups = [{**first, "params": group["params"]} for group in loaded["param_groups"]]
        return {**loaded, "param_groups": groups}

    return wrong


@breaks("fsdp/parameter-groups", says="groups: rank . is wrong")
class AllGroupsHaveTheFirstOnesSettings(Swapped):
    swaps = ((optim_load, "_rekey", _with_the_first_settings),)


@breaks("fsdp/optimizer-state-channels-last", says="came back to its place")
class FlattensInTheUsualOrder(Swapped):
    """As torch 2.13 does."""

    swaps = (
        (
            flat_param.FlatMetadata,
            "flatten_one",
            lambda _: lambda self, index, tensor: tensor.reshape(-1),
        ),
    )

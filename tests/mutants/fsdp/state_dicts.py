"""Mutants of conformance/spec/fsdp/state_dicts.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from impl.fsdp.checkpoint import state_dict
from tests.mutants.fsdp.kit import Swapped, always, nothing, rolled_afterwards
from tests.mutants.kit import breaks


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
    """Entries are views of memory that is freed and gathered again later."""

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
    """Entries on the CPU have memory, but the copies to it are not waited for."""

    swaps = ((state_dict, "_save_full", _promised),)


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
    """Chunks are saved and loaded in reverse, so that its own state dicts can be loaded."""

    swaps = (
        (state_dict, "sharded_tensor_from_flat_shard", _reversed),
        (state_dict, "_load_local", _reversed_again),
    )


@breaks("fsdp/mesh-has-no-local-state-dict", says="was to raise")
class SavesChunksOfAMesh(Swapped):
    swaps = ((state_dict, "require_no_device_mesh", nothing),)


def _lost(right: Any) -> Any:
    return lambda state, options: right(state, replace(options, writeback=False))


@breaks("fsdp/loads-the-bare-state-dict", says="is wrong")
@breaks("fsdp/exchanges-with-ddp", says="is wrong")
@breaks("fsdp/outer-module", says="loading left another value")
class LoadedValuesAreLost(Swapped):
    """Loaded values get into the full parameters, but not into the shards."""

    swaps = ((state_dict, "_shown_in_full", _lost),)


@breaks("fsdp/full-state-dict", says="got|raised")
class KeysHaveTheWrappersNames(Swapped):
    swaps = ((state_dict, "replace_prefix", nothing),)


@breaks("fsdp/full-state-dict-on-rank-0", says="other ranks' keys")
class EveryRankGetsAll(Swapped):
    swaps = ((state_dict, "_is_rank0_only", always(False)),)


def _without_ties(right: Any, state: Any, handle: Any, entries: Any, prefix: str) -> None:
    right(state, handle, entries, prefix)
    for tied in handle.metadata.shared:
        entries.pop(f"{prefix}{tied.module_name}.{tied.name}")


@breaks("fsdp/tied-state-dict", says="got")
class TiedWeightsAreSavedUnderOneName(Swapped):
    swaps = (
        (
            state_dict,
            "_save_full",
            lambda right: (
                lambda state, handle, entries, prefix: _without_ties(
                    right, state, handle, entries, prefix
                )
            ),
        ),
    )


def _rolled(right: Any) -> Any:
    def wrong(value: Any, *args: Any, **kwargs: Any) -> Any:
        return right(value.roll(1, 0), *args, **kwargs)

    return wrong


@breaks("fsdp/sharded-state-dict", says="is wrong")
class ShardsHoldTheNextRows(Swapped):
    swaps = ((state_dict, "shard_rows", _rolled),)


@breaks("fsdp/sharded-state-dict-loads", says="is wrong")
class LoadsTheNextRows(Swapped):
    swaps = ((state_dict, "unshard_rows", rolled_afterwards),)


@breaks("fsdp/exchanges-sharded-with-torch", says="is wrong")
class ShardedStateDictsDifferFromTorchs(Swapped):
    """Shards are saved and loaded with the same error, so that its own state dicts can be
    loaded."""

    swaps = (
        (state_dict, "shard_rows", _rolled),
        (
            state_dict,
            "unshard_rows",
            lambda right: lambda *args, **kwargs: right(*args, **kwargs).roll(-1, 0),
        ),
    )


@breaks("fsdp/local-state-dict", says="is wrong")
@breaks("fsdp/local-state-dict-original", says="is wrong")
class LocalStateDictsAreNotLoaded(Swapped):
    swaps = (
        (
            state_dict,
            "_load_local",
            lambda _: (
                lambda handle, entries, prefix: entries.update(
                    {prefix + "_flat_param": handle.local_shard.clone()}
                )
            ),
        ),
    )


@breaks("fsdp/buffers-in-full-precision", says="dtypes")
class BuffersAreSavedInLowPrecision(Swapped):
    swaps = ((state_dict, "_save_buffers", nothing),)

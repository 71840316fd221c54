"""Faults of FSDP's state dicts, and of what the constructor is given."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn

from impl.fsdp import api
from impl.fsdp.build import construct as build
from impl.fsdp.build import materialize
from impl.fsdp.checkpoint import optim_load, optim_save, state_dict, state_dict_type
from tests.mutants.fsdp.kit import Swapped, always, nothing
from tests.mutants.kit import breaks


@breaks("fsdp/full-state-dict", says="got|raised")
class KeysHaveTheWrappersNames(Swapped):
    swaps = ((state_dict, "replace_prefix", nothing),)


@breaks("fsdp/full-state-dict-on-rank-0", says="other ranks' keys")
class EveryRankGetsAll(Swapped):
    swaps = ((state_dict, "_is_rank0_only", always(False)),)


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


def _without_ties(right: Any, state: Any, handle: Any, entries: Any, prefix: str) -> None:
    right(state, handle, entries, prefix)
    for tied in handle.metadata.shared:
        entries.pop(f"{prefix}{tied.module_name}.{tied.name}")


def _rolled(right: Any) -> Any:
    def wrong(value: Any, *args: Any, **kwargs: Any) -> Any:
        return right(value.roll(1, 0), *args, **kwargs)

    return wrong


@breaks("fsdp/sharded-state-dict", says="is wrong")
class ShardsHoldTheNextRows(Swapped):
    swaps = ((state_dict, "shard_rows", _rolled),)


def _rolled_afterwards(right: Any) -> Any:
    def wrong(*args: Any, **kwargs: Any) -> Any:
        return right(*args, **kwargs).roll(1, 0)

    return wrong


@breaks("fsdp/sharded-state-dict-loads", says="is wrong")
class LoadsTheNextRows(Swapped):
    swaps = ((state_dict, "unshard_rows", _rolled_afterwards),)


@breaks("fsdp/exchanges-sharded-with-torch", says="is wrong")
class NobodyElseUnderstandsItsShards(Swapped):
    """Wrong in the same way both times, so that its own state dicts come back."""

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


@breaks("fsdp/state-dict-types-after-error", says="types: rank 0 is wrong")
class AnErrorLeavesTheType(Swapped):
    """As in torch 2.13."""

    swaps = ((state_dict_type.StateDictTypeMethods, "state_dict_type", _without_finally),)


@breaks("fsdp/full-optimizer-state", says="is wrong")
@breaks("fsdp/full-optimizer-state-offloaded", says="is wrong")
@breaks("fsdp/optimizer-state-and-the-bare-module", says="is wrong")
class OptimizerStateIsShifted(Swapped):
    swaps = ((optim_save, "_gather", _rolled_afterwards),)


@breaks("fsdp/full-optimizer-state-original", says="is wrong")
class OptimizerStateOfOriginalParametersIsShifted(Swapped):
    swaps = (
        (
            optim_save,
            "_finished",
            lambda right: lambda unit, value, options: right(unit, value.roll(1, 0), options),
        ),
    )


@breaks("fsdp/optimizer-state-loads", says="differences")
@breaks("fsdp/optimizer-loads-directly", says="is wrong")
@breaks("fsdp/checkpoint", says="is wrong")
@breaks("fsdp/older-optimizer-functions", says="differences")
@breaks("fsdp/exchanges-full-with-torch", says="is wrong")
class OptimizerStateIsLoadedShifted(Swapped):
    swaps = ((optim_load, "_flatten_tensors", _rolled_afterwards),)


# The constructor


@breaks("fsdp/sync-module-states", says="means of entries")
class BuffersAreNotSynchronized(Swapped):
    swaps = (
        (
            materialize,
            "sync_module_states",
            lambda right: lambda module, *args: right(nn.Module(), *args),
        ),
    )


@breaks("fsdp/sync-module-states-hybrid", says="means of entries")
class NodesAreSynchronizedApart(Swapped):
    """pytorch#178569"""

    swaps = (
        (
            materialize,
            "sync_module_states",
            lambda right: (
                lambda module, params, groups, device: right(module, params, groups[-1:], device)
            ),
        ),
    )


@breaks("fsdp/meta-device", says="parameter and buffers|raised")
class MetaModulesAreNotReset(Swapped):
    swaps = ((materialize, "_reset_parameters", lambda _: _made_empty),)


@breaks("fsdp/meta-device", says="parameter and buffers")
class ResetsModulesWithParameters(Swapped):
    """Others are made empty."""

    @staticmethod
    def _sorted_out(right: Any) -> Any:
        def reset(modules: Any, device: Any) -> None:
            modules = list(modules)
            with_own = [m for m in modules if next(m.parameters(recurse=False), None) is not None]
            right(with_own, device)
            _made_empty([m for m in modules if m not in with_own], device)

        return reset

    swaps = ((materialize, "_reset_parameters", _sorted_out),)


def _made_empty(modules: Any, device: Any) -> None:
    for module in modules:
        module.to_empty(device=device, recurse=False)
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            tensor.detach().zero_()


@breaks("fsdp/ignored-modules", says="ignored (parameters|weight)|units")
@breaks("fsdp/ignored-in-state-dict", says="types")
@breaks("fsdp/ignored-parameters", says="zip|ignored parameters")
@breaks("fsdp/ignored-instance", says="was to raise")
class IgnoresNothing(Swapped):
    swaps = (
        (api, "resolve_ignored", lambda right: lambda module, *args: right(module, None, None)),
    )


@breaks("fsdp/comm-hook", says="calls and gradients")
@breaks("fsdp/comm-hook-no-shard", says="calls and gradients")
@breaks("fsdp/comm-hook-refused", says="was to raise")
class HooksAreNotCalled(Swapped):
    swaps = ((api.FullyShardedDataParallel, "register_comm_hook", nothing),)


@breaks("fsdp/strategy-changes", says="was to raise")
class TakesAnotherStrategyWithoutAWord(Swapped):
    """As torch 2.13 does."""

    swaps = (
        (
            api.FullyShardedDataParallel,
            "sharding_strategy",
            lambda right: property(right.fget, lambda self, strategy: None),
        ),
    )


@breaks("fsdp/tied-across-units", says="was to raise")
class CutsTies(Swapped):
    """As torch 2.13 does."""

    swaps = ((build, "check_not_shared_with_nested", nothing),)

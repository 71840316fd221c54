"""Faults of FSDP's constructor and of its precision: wrapping, casts, offloading, hooks, meshes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from impl.fsdp import api
from impl.fsdp.build import construct as build
from impl.fsdp.build import groups, materialize, wrapping
from impl.fsdp.flat_param import config, handle, views
from impl.fsdp.step import buffers, forward, reduction, sharding, tree
from tests.mutants.fsdp.kit import Swapped, always, nothing
from tests.mutants.kit import breaks

# The wrapper


def _with_few_arguments(right: Any) -> Any:
    def wrong(self: Any, module: nn.Module, process_group: Any = None) -> None:
        right(self, module, process_group)

    return wrong


@breaks("fsdp/signature", says="arguments: rank . ")
@breaks("fsdp/annotated-wrapping", says="unexpected keyword argument")
class TakesAModuleAndAGroupAlone(Swapped):
    swaps = ((api.FullyShardedDataParallel, "__init__", _with_few_arguments),)


@breaks("fsdp/transparent", says="has no attribute 'mark'")
class HidesTheModule(Swapped):
    swaps = ((api.FullyShardedDataParallel, "__getattr__", lambda _: nn.Module.__getattr__),)


def _turned(found: list[Any]) -> list[Any]:
    return found[:1] + found[:0:-1]


@breaks("fsdp/instances", says="instances: rank . is wrong")
class ListsTheLastInnerInstanceFirst(Swapped):
    swaps = (
        (
            api.FullyShardedDataParallel,
            "fsdp_modules",
            lambda right: staticmethod(
                lambda module, root_only=False: _turned(right(module, root_only))
            ),
        ),
    )


def _of_one_strategy(right: Any) -> Any:
    def wrong(root: Any, chosen: Any, wrap: Any) -> None:
        alike = {module: {**kwargs, "sharding_strategy": None} for module, kwargs in chosen.items()}
        right(root, alike, wrap)

    return wrong


@breaks("fsdp/wrap-policies", says="units: rank . is wrong")
class PoliciesChangeNoArguments(Swapped):
    """What CustomPolicy says of a unit is not heard."""

    swaps = ((wrapping, "_wrap_chosen", _of_one_strategy),)


@breaks("fsdp/shared-module", says="the two names")
class WrapsInOnePlace(Swapped):
    """As torch 2.13 does."""

    swaps = ((wrapping, "_children", lambda _: lambda module: list(module.named_children())),)


@breaks("fsdp/param-init-fn", says="calls and values")
class ResetsInsteadOfAsking(Swapped):
    """`param_init_fn` is not called where a module can reset itself."""

    swaps = (
        (
            materialize,
            "materialize",
            lambda right: (
                lambda module, ignored, init, device: right(module, ignored, None, device)
            ),
        ),
    )


@breaks("fsdp/inputs-and-outputs", says="expected to be in states")
class LooksForBareTensors(Swapped):
    """Outputs in containers are not found."""

    swaps = (
        (
            tree,
            "tensors_in",
            lambda _: lambda value: [value] if isinstance(value, torch.Tensor) else [],
        ),
    )


@breaks("fsdp/replaced-parameters", says="cannot be converted to Scalar|outputs: rank . is wrong")
class OverlooksReplacedParameters(Swapped):
    swaps = ((sharding, "write_back_orig_params", always(False)),)


@breaks("fsdp/alone", says="strategy: rank . is wrong")
class ShardsOverOneRank(Swapped):
    swaps = ((build, "resolve_strategy", lambda _: lambda strategy, size: strategy),)


# Meshes


@breaks("fsdp/device-mesh", says="is wrong")
class ShardsOverTheDefaultGroup(Swapped):
    """A mesh of one dimension is taken for all ranks."""

    swaps = ((groups, "_plain_group", lambda right: lambda group, mesh: right(group, None)),)


def _the_other_way_round(right: Any) -> Any:
    def wrong(process_group: Any, mesh: Any, device: Any) -> Any:
        found = right(process_group, mesh, device)
        return found if mesh is None else found[::-1]

    return wrong


@breaks("fsdp/device-mesh-hybrid", says="elements that a rank holds")
class ShardsOverTheFirstDimension(Swapped):
    swaps = ((groups, "_hybrid_groups", _the_other_way_round),)


# Precision


def _in_full(right: Any) -> Any:
    def wrong(original: Any, mixed_precision: Any) -> Any:
        return replace(right(original, mixed_precision), compute=original)

    return staticmethod(wrong)


@breaks("fsdp/param-dtype", says="weight: float32, want bfloat16")
@breaks("fsdp/gather-dtype", says=r"all_gather float32\[\d+\], want bfloat16")
class ComputesInFullPrecision(Swapped):
    swaps = ((config.Dtypes, "of", _in_full),)


def _from_the_first_cast(right: Any) -> Any:
    def wrong(self: Any) -> None:
        right(self)
        self.device_handle.flush()
        cast = self.low_precision_shard
        cast.copy_(self.__dict__.setdefault("first_cast", cast.clone()))

    return wrong


@breaks("fsdp/low-precision-training", says="is wrong")
class CastsParametersOnce(Swapped):
    """What is gathered in low precision does not follow the optimizer."""

    swaps = ((handle.FlatParamHandle, "use_low_precision_shard", _from_the_first_cast),)


def _cast_always(right: Any) -> Any:
    def wrong(state: Any, args: Any, kwargs: Any) -> Any:
        moved = right(state, args, kwargs)
        return tree.cast_floating(moved, state.mixed_precision.param_dtype)

    return wrong


@breaks("fsdp/no-cast-inputs", says="x: bfloat16, want float32")
class InputsAreAlwaysCast(Swapped):
    swaps = ((forward, "root_pre_forward", _cast_always),)


def _not_recomputed(right: Any) -> Any:
    def wrong(state: Any, args: Any, kwargs: Any) -> Any:
        if forward.is_recomputing(state.handle):
            return args, kwargs
        return right(state, args, kwargs)

    return wrong


@breaks("fsdp/recomputed-casts", says="is wrong")
class RecomputesFromWhatWasNotCast(Swapped):
    """As torch 2.13 does."""

    swaps = ((forward, "_cast_inputs", _not_recomputed),)


@breaks("fsdp/buffer-dtype", says="dtypes of buffers")
class BuffersAreNotCast(Swapped):
    swaps = ((buffers, "cast_and_move", nothing),)


@breaks("fsdp/batch-norm-in-full-precision", says="BFloat16|dtypes of weights")
class NormLayersComputeInLowPrecision(Swapped):
    swaps = ((wrapping, "_keep_in_full_precision", nothing),)


@breaks("fsdp/full-precision-eval", says="dtypes")
class EvaluatesInLowPrecision(Swapped):
    """The variable in the environment goes by another name."""

    swaps = (
        (handle, "ENV_FULL_PRECISION_IN_EVAL", lambda _: "FSDP_FULL_PRECISION_IN_EVAL"),
        (build, "ENV_FULL_PRECISION_IN_EVAL", lambda _: "FSDP_FULL_PRECISION_IN_EVAL"),
    )


@breaks("fsdp/past-setattr", says="=1: calls of __setattr__")
class NobodyIsPassedBy(Swapped):
    """The variable in the environment goes by another name."""

    swaps = ((handle, "ENV_UNSAFE_SETATTR", lambda _: "FSDP_UNSAFE_SETATTR"),)


@breaks("fsdp/past-setattr", says="=0: calls of __setattr__")
class EverybodyIsPassedBy(Swapped):
    swaps = ((views, "_uses_plain_attributes", lambda _: lambda module: True),)


@breaks("fsdp/cpu-offload", says="is wrong")
class OffloadedGradientsGoAstray(Swapped):
    """They are copied to memory that the optimizer does not look at."""

    swaps = (
        (
            handle.FlatParamHandle,
            "cpu_grad_buffer",
            lambda right: lambda self: right(self).clone(),
        ),
    )


# Hooks, and parts of units


def _averaged_again(right: Any) -> Any:
    def wrong(state: Any, handle: Any, shard: torch.Tensor) -> None:
        if state.comm_hook is not None:
            shard.div_(state.world_size)
        right(state, handle, shard)

    return wrong


@breaks("fsdp/default-hooks", says="is wrong")
class AveragesWhatAHookHasAveraged(Swapped):
    swaps = ((reduction, "_finish", _averaged_again),)


def _depth(state: Any) -> int:
    return sum(
        other is not state and any(part is state.wrapper for part in other.wrapper.modules())
        for other in state.shared.states
    )


def _averaged_by_depth(right: Any) -> Any:
    def wrong(state: Any, handle: Any, shard: torch.Tensor) -> None:
        state.device_handle.flush()
        right(state, handle, shard / max(1, _depth(state)))

    return wrong


@breaks("fsdp/nested-units", says="is wrong")
class AveragesAtEachLevel(Swapped):
    """Gradients of units within units come out too small."""

    swaps = ((reduction, "_finish", _averaged_by_depth),)


@breaks("fsdp/frozen-parts", says="is wrong")
class TrainsFrozenParts(Swapped):
    """Original parameters require gradients, whether they did before or not."""

    swaps = ((views, "_as_parameter", lambda _: lambda tensor: nn.Parameter(tensor.detach())),)


@breaks("fsdp/checkpointed", says="of shape|is wrong")
class RecomputesWithOtherTensors(Swapped):
    """With original parameters, the backward shows no tensors of the forward."""

    swaps = ((views.OrigParamViews, "show_backward_tensors", nothing),)

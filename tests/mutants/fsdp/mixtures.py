"""Mutants of conformance/spec/fsdp/mixtures.py."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from impl import nested_tensors
from impl.fsdp import common
from impl.fsdp.checkpoint import optim_names, state_dict
from impl.fsdp.flat_param import config, gradients
from impl.fsdp.step import buffers, forward, grad_norm, reduction, unshard_params
from tests.mutants.fsdp.kit import Swapped, as_property, nothing
from tests.mutants.kit import breaks


def _unless_the_root_is_sharded(right: Any) -> Any:
    def wrong(state: Any, handle: Any, computed: torch.Tensor) -> None:
        if state.shared.root.handle.config.uses_sharding:
            reduction._publish(state, handle, computed)
        else:
            right(state, handle, computed)

    return wrong


@breaks("fsdp/mixed-strategies", says="is wrong")
class ReplicasInShardedModelsDrift(Swapped):
    """The root's strategy is taken for that of all units."""

    swaps = ((reduction, "_all_reduce_in_place", _unless_the_root_is_sharded),)


def _all_as_shards(right: Any) -> Any:
    def wrong(state: Any) -> Any:
        found = right(state)
        found.sharded += found.replicated
        found.replicated = []
        return found

    return wrong


@breaks("fsdp/norm-of-mixed-strategies", says="norms .* is wrong")
class NormCountsWhatIsReplicatedOnEveryRank(Swapped):
    swaps = ((grad_norm, "_collect", _all_as_shards),)


@breaks("fsdp/norm-of-mixed-strategies", says="norms .* is wrong")
class ClipsWhatIsShardedAlone(Swapped):
    swaps = (
        (
            grad_norm._Parameters,
            "grads",
            lambda _: property(lambda self: [p.grad for p in self.sharded if p.grad is not None]),
        ),
    )


@breaks("fsdp/checkpointed-names", says="names: rank . is wrong")
class OptimizerStateTellsOfCheckpoints(Swapped):
    swaps = (
        (
            optim_names,
            "clean_tensor_name",
            lambda _: lambda name: name.replace(common.FSDP_PREFIX, ""),
        ),
    )


@breaks("fsdp/cast-unit-inputs", says="raised|dtypes of inputs")
class TheRootAloneCastsInputs(Swapped):
    swaps = ((forward, "_cast_inputs", lambda _: lambda state, args, kwargs: (args, kwargs)),)


def _of_detached(right: Any) -> Any:
    def wrong(inputs: Any, dtype: Any) -> Any:
        cast = right(inputs, dtype)
        return nested_tensors.map_tensors(torch.Tensor.detach, cast) if dtype is not None else cast

    return wrong


@breaks("fsdp/cast-unit-inputs", says="raised|is wrong")
class GradientsEndAtTheCast(Swapped):
    swaps = ((nested_tensors, "cast_floating", _of_detached),)


def _rounded(right: Any) -> Any:
    def wrong(state: Any, handle: Any, *streams: Any) -> None:
        right(state, handle, *streams)
        state.device_handle.flush()
        whole = handle.flat_param.data
        whole.copy_(whole.to(handle.dtypes.compute))

    return wrong


@breaks("fsdp/state-dict-in-full-precision", says="is wrong")
class StateDictsAreGatheredInLowPrecision(Swapped):
    swaps = ((unshard_params, "unshard", _rounded),)


def _decided_by_the_outermost(right: Any) -> Any:
    return lambda states: right(list(states)[:1])


@breaks("fsdp/buffer-dtype-of-units", says="dtypes of buffers")
class TheRootDecidesOnBuffers(Swapped):
    swaps = ((buffers, "computation_dtypes", _decided_by_the_outermost),)


def _ignored_too(right: Any) -> Any:
    def wrong(states: Any) -> Any:
        states = list(states)
        found = right(states)
        known = {id(buffer) for buffer, _ in found}
        root = states[0]
        return found + [
            (buffer, root.mixed_precision.buffer_dtype)
            for buffer in root.wrapper.buffers()
            if id(buffer) not in known
        ]

    return wrong


@breaks("fsdp/buffer-dtype-of-units", says="dtypes of buffers")
class IgnoredBuffersAreCast(Swapped):
    swaps = ((buffers, "computation_dtypes", _ignored_too),)


def _then_in_full(right: Any) -> Any:
    def wrong(state: Any, handle: Any, computed: torch.Tensor) -> None:
        right(state, handle, computed)
        state.device_handle.flush()
        grad = handle.flat_param.grad
        grad.data = grad.to(handle.dtypes.original)
        gradients.show_sharded_grads(handle, grad)

    return wrong


@breaks("fsdp/keep-low-precision-gradients", says="gradients with NO_SHARD")
class ReplicasGradientsAreInFullPrecision(Swapped):
    swaps = ((reduction, "_all_reduce_in_place", _then_in_full),)


def _for_shards(right: Any) -> Any:
    def wrong(state: Any, handle: Any, grad: torch.Tensor) -> torch.dtype:
        dtype: torch.dtype = right(state, handle, grad)
        return dtype if handle.config.uses_sharding else grad.dtype

    return wrong


@breaks("fsdp/scatter-dtype", says="the backward issued .*bfloat16")
class ReplicasReduceInTheDtypeOfTheGradient(Swapped):
    swaps = ((reduction, "_reduce_dtype", _for_shards),)


def _of_the_world(right: Any) -> Any:
    def wrong(state: Any, handle: Any, entries: Any, prefix: str) -> None:
        right(state, handle, entries, prefix)
        if state_dict._is_rank0_only(state) and dist.get_rank() != 0:
            for key in state_dict.param_keys(handle):
                entries.pop(prefix + key, None)

    return wrong


@breaks("fsdp/rank-0-of-a-group", says="entries of state dicts")
class OnlyTheWorldHasARank0(Swapped):
    swaps = ((state_dict, "_save_full", _of_the_world),)


@breaks("fsdp/scatter-dtype", says="want (b?float32|bfloat16)|issued .'all_reduce bfloat16")
@breaks("fsdp/with-torch-low-precision", says="ranks disagree on dtype|raised|is wrong")
class ReducesInTheDtypeOfTheGradient(Swapped):
    """The reduce_dtype never reaches the wire (pytorch#63375, for a hook of DDP)."""

    swaps = ((reduction, "_reduce_dtype", lambda _: lambda state, handle, grad: grad.dtype),)


@breaks("fsdp/keep-low-precision-gradients", says=r"want (bfloat16|'torch\.bfloat16')")
class GradientsAreAlwaysInFullPrecision(Swapped):
    swaps = (
        (config.HandleConfig, "keeps_low_precision_grads", as_property(False)),
        (gradients, "_cast_grad", nothing),
    )


def _as_zeros(right: Any) -> Any:
    def put_aside(handle: Any, grad: torch.Tensor) -> None:
        right(handle, grad)
        if grad.dtype != handle.dtypes.original:
            handle.saved_grad_shard.zero_()

    return put_aside


@breaks("fsdp/keep-low-precision-gradients", says="the first pass's gradients are lost")
class LosesKeptGradients(Swapped):
    """A gradient in low precision that was not cleared is dropped in the next backward pass."""

    swaps = ((gradients, "_put_aside", _as_zeros),)

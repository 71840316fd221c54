"""Mutants of conformance/spec/fsdp/clipping.py."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from impl.fsdp import api
from impl.fsdp.step import grad_norm
from impl.fsdp.step.grad_norm import clip_grad_norm
from tests.mutants.fsdp.kit import Swapped, always, as_property, nothing
from tests.mutants.kit import breaks


def _with_ones(right: Any) -> Any:
    def wrong(params: Any, norm_type: float, dtype: torch.dtype) -> Any:
        norm = right(params, norm_type, dtype)
        return torch.ones((), dtype=dtype) if norm is None and list(params) else norm

    return wrong


@breaks("fsdp/norm-without-gradients", says="norms: rank . is wrong")
class CountsGradientsThatAreNotThere(Swapped):
    """A rank without gradients has a norm of 1."""

    swaps = ((grad_norm, "_local_norm", _with_ones),)


@breaks("fsdp/norm-of-doubles", says="without narrowing")
class NormsAreInSinglePrecision(Swapped):
    """The norm of float64 gradients is computed in float32, as in torch 2.13."""

    swaps = ((grad_norm._Parameters, "norm_dtype", as_property(torch.float32)),)


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


@breaks("fsdp/norm", says="is wrong")
class NormOfTheOwnShard(Swapped):
    """The norm is that of the rank's own shard (RLinf#1558)."""

    swaps = ((dist, "all_reduce", nothing),)


def _over_all_ranks(right: Any) -> Any:
    def wrong(tensor: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, **kwargs: Any) -> Any:
        return right(tensor, op=op, group=None if tensor.numel() == 1 else group, **kwargs)

    return wrong


@breaks("fsdp/norm-hybrid", says="is wrong")
class NormCountsReplicas(Swapped):
    """The norm counts each element once per replica (VeOmni#184)."""

    swaps = ((dist, "all_reduce", _over_all_ranks),)


@breaks("fsdp/norm-clips", says="norms before and after clipping")
class NormIsComputedAndNothingClipped(Swapped):
    swaps = ((torch, "clamp", always(torch.ones(()))),)


def _two_for_three(right: Any) -> Any:
    def wrong(state: Any, max_norm: float, norm_type: float) -> Any:
        return right(state, max_norm, 2.0 if norm_type == 3.0 else norm_type)

    return wrong


@breaks("fsdp/norm", says="3 and infinity, .* rank 2 is wrong")
class KnowsThreeNorms(Swapped):
    """Any norm but the maximum and the sum is the Euclidean one."""

    swaps = ((api, "clip_grad_norm", _two_for_three),)


def _take_all_as_sharded(right: Any) -> Any:
    def wrong(state: Any) -> Any:
        params = right(state)
        return grad_norm._Parameters(params.sharded + params.replicated)

    return wrong


@breaks("fsdp/norm-of-ignored", says="norms, and a clipped gradient: rank 0 is wrong")
class NormCountsIgnoredParametersOncePerRank(Swapped):
    """What every rank has in full is summed over the ranks like shards."""

    swaps = ((grad_norm, "_collect", _take_all_as_sharded),)


def _in_single_precision(right: Any) -> Any:
    def wrong(*args: Any) -> Any:
        return right(*args).float()

    return wrong


@breaks("fsdp/norm", says="norm in low precision: rank 0 is wrong")
@breaks("fsdp/keep-low-precision-gradients", says="norm in low precision: rank 0 is wrong")
class NormsOfLowPrecisionAreWidened(Swapped):
    """The norm has at least single precision, whatever the gradients have."""

    swaps = ((api, "clip_grad_norm", _in_single_precision),)

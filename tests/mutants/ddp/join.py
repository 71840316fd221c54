"""Mutants of conformance/spec/ddp/join.py."""

from __future__ import annotations

import contextlib
from typing import Any

import torch.distributed as dist

from impl.ddp.iteration.reducer import Reducer
from impl.ddp.iteration.reduction import BucketReduction
from impl.ddp.wrapper import module_sync
from impl.ddp.wrapper.api import DistributedDataParallel
from impl.ddp.wrapper.join import DDPJoinHook
from impl.ddp.wrapper.logging_data import Logger
from tests.mutants.ddp.kit import DDPMutant, afterwards, instead, swap
from tests.mutants.kit import breaks


@breaks("ddp/join/effective-world-size-accumulated", says="gradient of step 2")
class CountsRanksInTheFirstPass(DDPMutant):
    """Who has input is counted in the first pass of an accumulation, not in the last one."""

    @staticmethod
    def _count_once(right: Any) -> Any:
        def set_forward_work(self: Any, work: Any, use_static_world_size: bool) -> None:
            if self._forward_work is None:
                right(self, work, use_static_world_size)

        return set_forward_work

    patched = swap(BucketReduction, "set_forward_work", _count_once)


@breaks("ddp/join/afterwards", says="ranks disagree|gradients after join")
class StaysJoined(DDPMutant):
    """A rank that ran out of input early averages no gradients any more."""

    patched = afterwards(
        DDPJoinHook,
        "post_hook",
        lambda self, is_last: setattr(self._ddp, "require_backward_grad_sync", is_last),
    )


@breaks("ddp/join/group", says="invalid root")
class TakesItsRankInTheWorld(DDPMutant):
    patched = swap(
        DistributedDataParallel,
        "_distributed_rank",
        lambda right: property(lambda self: dist.get_rank()),
    )


@breaks("ddp/join/no-input-at-all", says="parameter 0 at the end")
class RanksWithoutInputMayGiveTheFinalModel(DDPMutant):
    """A rank that had no input counts among those that joined last: its model may be the final."""

    patched = swap(
        DistributedDataParallel,
        "_sync_final_model",
        lambda right: (
            lambda self, is_last_joiner: right(self, is_last_joiner or not self.reducer.iteration)
        ),
    )


@breaks("ddp/join/unused-parameters", says="ranks disagree on numel")
class JoinedRanksBeginAtTheEnd(DDPMutant):
    """A joined rank reduces buckets from the last to the first."""

    patched = swap(
        Reducer, "_get_zeros_like_grad_buckets", lambda right: lambda self: right(self)[::-1]
    )


@breaks("ddp/join/no-sync", says="gradient of step 2 on rank 1")
class JoinKnowsNoNoSync(DDPMutant):
    """Inside join() every pass is synchronised."""

    patched = swap(
        DistributedDataParallel,
        "no_sync",
        lambda right: (
            lambda self: contextlib.nullcontext() if self._join_config.enable else right(self)
        ),
    )


def _join_with(**always: Any) -> Any:
    """join() with arguments that cannot be changed."""
    return swap(
        DistributedDataParallel,
        "join",
        lambda right: lambda self, **how: right(self, **{**how, **always}),
    )


@breaks("ddp/join/throw-on-early-termination", says="rank 0 was to raise RuntimeError")
class NeverThrows(DDPMutant):
    patched = _join_with(throw_on_early_termination=False)


@breaks("ddp/join/disabled", says="operations: rank 0 is wrong")
class CannotBeDisabled(DDPMutant):
    patched = _join_with(enable=True)


@breaks("ddp/join/uneven-inputs", says="gradient of step")
class DividesByTheActiveRanks(DDPMutant):
    patched = swap(
        BucketReduction,
        "set_forward_work",
        lambda right: lambda self, work, _: right(self, work, False),
    )


@breaks("ddp/join/effective-world-size", says="gradient of step")
class DividesByTheInitialWorldSize(DDPMutant):
    patched = swap(
        BucketReduction,
        "set_forward_work",
        lambda right: lambda self, work, _: right(self, work, True),
    )


@breaks("ddp/join/final-model", says="state: rank|are of ranks")
class NoFinalModel(DDPMutant):
    patched = instead(DistributedDataParallel, "_sync_final_model", lambda self, is_last: None)


@breaks("ddp/join/logged", says="join_uneven_inputs")
class DoesNotSayThatItJoined(DDPMutant):
    patched = instead(Logger, "_set_uneven_input_join", lambda self: None)


@breaks("ddp/join/another-division", says="gradients of steps alone")
class DividesAsTheFirstJoinDid(DDPMutant):
    @staticmethod
    def _join(right: Any) -> Any:
        def join(self: Any, divide_by_initial_world_size: bool = True, *args: Any) -> Any:
            first = self.__dict__.setdefault("_first_division", divide_by_initial_world_size)
            return right(self, first, *args)

        return join

    patched = swap(DistributedDataParallel, "join", _join)


def _two_kinds(right: Any) -> Any:
    def broadcast(group: Any, tensors: Any, size: int, src: int = 0) -> None:
        if src:
            kinds = list(dict.fromkeys(tensor.dtype for tensor in tensors))[:2]
            tensors = [tensor for tensor in tensors if tensor.dtype in kinds]
        right(group, tensors, size, src)

    return broadcast


@breaks("ddp/join/final-model", says="state: rank . .* differ")
class GivesTwoKindsOfTensors(DDPMutant):
    """At the end of join, states of a third dtype are not broadcast."""

    patched = swap(module_sync, "broadcast_coalesced", _two_kinds)


@breaks("ddp/join/no-sync", says="ranks disagree")
class JoinedRanksAlwaysBroadcastBuffers(DDPMutant):
    """A rank that has joined syncs buffers before each forward of the others, whether they do."""

    patched = afterwards(
        DDPJoinHook,
        "main_hook",
        lambda self: setattr(self._ddp, "require_forward_param_sync", True),
    )

"""Communication hooks of the library that compute wrongly, and futures that are taken wrongly."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from impl.ddp.iteration import reduction
from impl.ddp.iteration.reducer import Reducer
from tests.mutants.ddp.kit import DDPFault, afterwards, instead, swap
from tests.mutants.kit import breaks


@breaks("comm_hooks/then", says="gradients: rank 0 is wrong")
class ThenChangesNothing(DDPFault):
    """What a callback returns is dropped: the chained future is the first one."""

    patched = swap(
        torch.futures.Future, "then", lambda right: lambda self, call: (right(self, call), self)[1]
    )


def _once_a_bucket(right: Any) -> Any:
    def run_hook(hook: Any, state: Any, bucket: Any) -> Any:
        all_reduce, calls = dist.all_reduce, [0]

        def counted(*args: Any, **how: Any) -> Any:
            calls[0] += 1
            if calls[0] > 1:
                raise RuntimeError("a second collective in one hook")
            return all_reduce(*args, **how)

        with mock.patch.object(dist, "all_reduce", counted):
            return right(hook, state, bucket)

    return run_hook


@breaks("comm_hooks/several-collectives", says="RuntimeError: a second collective in one hook")
class OneCollectiveForEachBucket(DDPFault):
    patched = swap(reduction, "run_hook", _once_a_bucket)


def _compressing(dtype: torch.dtype, *, before: bool, after: bool) -> Any:
    """A hook that adds up in `dtype`, and divides before or after that, or not at all."""

    def hook(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        n = dist.get_world_size(group)
        small = bucket.buffer().to(dtype).div_(n if before else 1)
        work: Any = dist.all_reduce(small, group=group, async_op=True)
        future: torch.futures.Future[Tensor] = work.get_future().then(
            lambda done: bucket.buffer().copy_(done.value()[0].div_(n if after else 1))
        )
        return future

    return hook


@breaks("comm_hooks/library/fp16", says="gradient . of step 1")
class AddsHalvesUp(DDPFault):
    patched = instead(
        default_hooks,
        "fp16_compress_hook",
        _compressing(torch.float16, before=False, after=False),
    )


@breaks("comm_hooks/library/fp16-range", says="gradient: rank 0 is wrong")
class HalvesOverflow(DDPFault):
    patched = instead(
        default_hooks, "fp16_compress_hook", _compressing(torch.float16, before=False, after=True)
    )


@breaks("comm_hooks/library/bf16", says="gradient . of step 1")
class DividesBrainFloatsTwice(DDPFault):
    patched = instead(
        default_hooks, "bf16_compress_hook", _compressing(torch.bfloat16, before=True, after=True)
    )


@breaks("comm_hooks/library/fp16-wrapper", says="'float32'. travelled")
class WrapsNothing(DDPFault):
    patched = instead(default_hooks, "fp16_compress_wrapper", lambda hook: hook)


def _plain_average(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    return default_hooks.allreduce_hook(state.process_group, bucket)


@breaks("comm_hooks/library/power-sgd", says=r"singular values")
class NeverCompresses(DDPFault):
    patched = instead(powerSGD_hook, "powerSGD_hook", _plain_average)


def _before_the_fourth_step(right: Any) -> Any:
    def rebuild(self: Reducer) -> bool:
        """Twice without effect when there is an order to rebuild by."""
        delays = getattr(self, "delays", 0)
        if self._final_order and delays < 2:
            self.delays = delays + 1  # type: ignore[attr-defined]  # the fault's own note
            return False
        rebuilt: bool = right(self)
        return rebuilt

    return rebuild


@breaks("comm_hooks/library/power-sgd-state", says=r"Q begins again in step 4")
class RebuildsOncePowerSGDHasBegun(DDPFault):
    """The buckets of the third step are not yet what they stay."""

    patched = swap(Reducer, "_rebuild_buckets", _before_the_fourth_step)


@breaks("comm_hooks/library/power-sgd-invalid-state", says="rank 0 was to raise ValueError")
class BeginsALittleLater(DDPFault):
    """Compression that would begin too soon begins in the second step."""

    @staticmethod
    def _later(right: Any) -> Any:
        def init(self: Any, *args: Any, **how: Any) -> None:
            name = "start_powerSGD_iter"
            right(self, *args, **{**how, name: max(2, how[name])})

        return init

    patched = swap(powerSGD_hook.PowerSGDState, "__init__", _later)


@breaks("comm_hooks/library/power-sgd-pickle", says="after loading")
class LoadsWithoutErrors(DDPFault):
    """What compression left out before is not in a saved state."""

    @staticmethod
    def _forget(state: Any, _: Any) -> None:
        state.error_dict.clear()

    patched = afterwards(powerSGD_hook.PowerSGDState, "__setstate__", _forget)

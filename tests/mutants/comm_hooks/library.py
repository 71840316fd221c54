"""Mutants of conformance/spec/comm_hooks/library.py."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from impl.ddp.buckets.bucket import GradBucket
from impl.ddp.iteration import comm_hooks
from impl.ddp.iteration.comm_hooks import BUILTIN_HOOKS, sum_hook
from impl.ddp.iteration.reducer import Reducer
from impl.ddp.iteration.reduction import BucketReduction
from impl.ddp.wrapper.logging_data import Logger
from tests.mutants.ddp.kit import DDPMutant, afterwards, instead, swap
from tests.mutants.kit import breaks


def _forgetful(right: Any) -> Any:
    def hook(state: Any, bucket: Any) -> Any:
        state.p_memory_dict.clear()
        state.q_memory_dict.clear()
        return right(state, bucket)

    hook.__annotations__.clear()  # they are strings here, and contradict what a hook's should be
    return hook


@breaks("comm_hooks/library/power-sgd-state", says="Q begins again")
class PowerSGDBeginsAgain(DDPMutant):
    patched = swap(powerSGD_hook, "powerSGD_hook", _forgetful)


@breaks("comm_hooks/library/hook-then-optimizer", says="The size of tensor a")
@breaks("comm_hooks/bucket/parameters", says="gradient on rank")
class ParametersInReverse(DDPMutant):
    patched = swap(GradBucket, "parameters", lambda right: lambda self: right(self)[::-1])


def builtin(kind: str, wrong: Any) -> Any:
    """Another function in place of a builtin hook."""
    member = getattr(dist.BuiltinCommHookType, kind)
    return staticmethod(lambda: mock.patch.dict(BUILTIN_HOOKS, {member: wrong}))


@breaks("comm_hooks/builtin/allreduce", says="gradient . of step 1")
class BuiltinDoesNotDivide(DDPMutant):
    patched = builtin("ALLREDUCE", sum_hook)


def _compress_first(group: Any, bucket: Any) -> Any:
    compressed = bucket.buffer().to(torch.float16)
    future = comm_hooks.all_reduce(group, compressed).get_future()
    return future.then(lambda f: bucket.buffer().copy_(f.value()[0].div_(group.size())))


@breaks("comm_hooks/builtin/fp16", says="gradient: rank 0 is wrong")
class BuiltinDividesAfterwards(DDPMutant):
    patched = builtin("FP16_COMPRESS", _compress_first)


@breaks("comm_hooks/library/fp16-on-the-wire", says="'float32'. travelled")
class DoesNotCompress(DDPMutant):
    patched = instead(default_hooks, "fp16_compress_hook", default_hooks.allreduce_hook)


@breaks("comm_hooks/library/noop", says="backward issued")
class AlwaysReduces(DDPMutant):
    patched = swap(
        BucketReduction,
        "run_hook",
        lambda right: (
            lambda self, bucket: (
                self.group.allreduce([torch.zeros(1)]).wait(),
                right(self, bucket),
            )[1]
        ),
    )


@breaks("comm_hooks/library/allreduce", says="gradient . of step 1")
class HooksSeeDividedGradients(DDPMutant):
    patched = instead(BucketReduction, "_divisor", lambda self: self.group.size())


@breaks("comm_hooks/library/post-local-sgd", says="gradients .* want")
class NoBucketIsLast(DDPMutant):
    patched = instead(GradBucket, "is_last", lambda self: False)


@breaks("comm_hooks/logged", says="KeyError|name")
class DoesNotLogTheName(DDPMutant):
    patched = instead(Logger, "_set_comm_hook_name", lambda self, name: None)


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
class Fp16HookDoesNotDivide(DDPMutant):
    patched = instead(
        default_hooks,
        "fp16_compress_hook",
        _compressing(torch.float16, before=False, after=False),
    )


@breaks("comm_hooks/library/fp16-range", says="gradient: rank 0 is wrong")
class Fp16HookDividesAfterwards(DDPMutant):
    patched = instead(
        default_hooks, "fp16_compress_hook", _compressing(torch.float16, before=False, after=True)
    )


@breaks("comm_hooks/library/bf16", says="gradient . of step 1")
class Bf16HookDividesTwice(DDPMutant):
    patched = instead(
        default_hooks, "bf16_compress_hook", _compressing(torch.bfloat16, before=True, after=True)
    )


@breaks("comm_hooks/library/fp16-wrapper", says="'float32'. travelled")
class Fp16WrapperDoesNothing(DDPMutant):
    patched = instead(default_hooks, "fp16_compress_wrapper", lambda hook: hook)


def _plain_average(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    return default_hooks.allreduce_hook(state.process_group, bucket)


@breaks("comm_hooks/library/power-sgd", says=r"singular values")
class NeverCompresses(DDPMutant):
    patched = instead(powerSGD_hook, "powerSGD_hook", _plain_average)


def _before_the_fourth_step(right: Any) -> Any:
    def rebuild(self: Reducer) -> bool:
        """Twice without effect when there is an order to rebuild by."""
        delays = getattr(self, "delays", 0)
        if self._final_order and delays < 2:
            self.delays = delays + 1  # type: ignore[attr-defined]  # the mutant's own note
            return False
        rebuilt: bool = right(self)
        return rebuilt

    return rebuild


@breaks("comm_hooks/library/power-sgd-state", says=r"Q begins again in step 4")
class RebuildsOncePowerSGDHasBegun(DDPMutant):
    """The buckets of the third step are not yet what they stay."""

    patched = swap(Reducer, "_rebuild_buckets", _before_the_fourth_step)


@breaks("comm_hooks/library/power-sgd-invalid-state", says="rank 0 was to raise ValueError")
class CorrectsAnInvalidState(DDPMutant):
    """Compression that would begin too soon begins in the second step."""

    @staticmethod
    def _later(right: Any) -> Any:
        def init(self: Any, *args: Any, **how: Any) -> None:
            name = "start_powerSGD_iter"
            right(self, *args, **{**how, name: max(2, how[name])})

        return init

    patched = swap(powerSGD_hook.PowerSGDState, "__init__", _later)


@breaks("comm_hooks/library/power-sgd-pickle", says="after loading")
class DoesNotSaveTheErrorFeedback(DDPMutant):
    """What compression left out before is not in a saved state."""

    @staticmethod
    def _forget(state: Any, _: Any) -> None:
        state.error_dict.clear()

    patched = afterwards(powerSGD_hook.PowerSGDState, "__setstate__", _forget)


def _saturating(right: Any) -> Any:
    def hook(group: Any, bucket: Any) -> Any:
        bucket.buffer().clamp_(-65504.0, 65504.0)
        return right(group, bucket)

    return hook


@breaks("comm_hooks/builtin/fp16", says="gradient: rank 0 is wrong")
class SaturatesInHalfPrecision(DDPMutant):
    """What half precision cannot hold becomes its largest number."""

    patched = builtin(
        "FP16_COMPRESS", _saturating(BUILTIN_HOOKS[dist.BuiltinCommHookType.FP16_COMPRESS])
    )

"""Mutants of conformance/spec/ddp/optimizer_steps.py."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

from impl.ddp.wrapper.hook_registration import HookRegistration
from impl.ddp.wrapper.optimizer_in_backward import OptimizerInBackward
from tests.mutants.ddp.kit import DDPMutant, beforehand, instead, swap
from tests.mutants.kit import breaks


@breaks("ddp/optimizer/in-backward", says="rank 0 is wrong")
class StepsOnLocalGradients(DDPMutant):
    patched = swap(
        OptimizerInBackward,
        "_step",
        lambda right: lambda self, param, grad: right(self, param, grad * 2),
    )


@breaks("ddp/optimizer/in-backward", says="0: rank 0 is wrong")
class StepsOnHalvedSums(DDPMutant):
    """The sum of the gradients is halved, as if there were two ranks."""

    @staticmethod
    def _double(in_backward: Any, bucket: Any) -> None:
        bucket.buffer().mul_(in_backward._reducer.process_group.size() / 2)

    patched = beforehand(OptimizerInBackward, "_average_and_step", _double)


def _step_first(_: Any, param: Any, grad: Any) -> None:
    param.grad = grad
    param._in_backward_optimizers[0].step()


@breaks("ddp/optimizer/in-backward", says="0: rank 0 is wrong")
class OnlyTheFirstOptimizerSteps(DDPMutant):
    """Of several optimizers of a parameter only the first one steps."""

    patched = instead(OptimizerInBackward, "_step", _step_first)


@breaks("ddp/optimizer/fused", says="0: rank 0 is wrong")
class FusedOptimizerIgnoresItsArguments(DDPMutant):
    """A fused optimizer has its default settings, whatever was passed."""

    patched = swap(
        HookRegistration,
        "_register_fused_optim",
        lambda right: lambda self, optim, *_, **__: right(self, optim),
    )


@breaks("ddp/optimizer/zero-redundancy", says="0: rank 0 is wrong")
class ZeroRedundancyDoesNotShareParameters(DDPMutant):
    """Each rank's optimizer keeps its share of the parameters to itself."""

    @staticmethod
    def patched() -> AbstractContextManager[Any]:
        # Here, as the import warns, and only a rank ignores that.
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return mock.patch.object(ZeroRedundancyOptimizer, "_sync_params", return_value=None)

"""Mutants of conformance/spec/ddp/features.py."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

from impl.ddp.iteration.reducer import Reducer
from impl.ddp.wrapper import api
from impl.ddp.wrapper.api import DistributedDataParallel
from impl.ddp.wrapper.controls import WrapperControls
from impl.ddp.wrapper.hook_registration import HookRegistration
from impl.ddp.wrapper.optimizer_in_backward import OptimizerInBackward
from tests.mutants.ddp.kit import DDPMutant, afterwards, beforehand, constructor, instead, swap
from tests.mutants.kit import breaks


@breaks("ddp/update-group/after-an-unfinished-step", says="Expected to have finished reduction")
class ChangesGroupsBetweenStepsAlone(DDPMutant):
    patched = beforehand(Reducer, "_reset_state", lambda self: self._check_reducer_finalized())


@breaks(
    "ddp/update-group/after-an-error-in-backward",
    says="Encountered gradient which is undefined",
)
class RemembersWhatTheFailedPassUsed(DDPMutant):
    @staticmethod
    def _mark(reducer: Reducer) -> None:
        for index in range(len(reducer.params)):
            if reducer._reduction.used is not None:
                reducer._reduction.used.mark(index)

    patched = afterwards(Reducer, "_reset_state", _mark)


@breaks("ddp/optimizer/in-backward", says="rank 0 is wrong")
class StepsOnLocalGradients(DDPMutant):
    patched = swap(
        OptimizerInBackward,
        "_step",
        lambda right: lambda self, param, grad: right(self, param, grad * 2),
    )


@breaks("ddp/update-group/average", says="gradient in|'s gradient")
class KeepsItsGroup(DDPMutant):
    patched = instead(WrapperControls, "_update_process_group", lambda self, group: None)


@breaks("ddp/update-group/static-graph", says="gradient in both's group: rank 0 is wrong")
class ForgetsWhatAStaticGraphUses(DDPMutant):
    """The recorded graph stays, and the marks of the parameters that it uses are gone."""

    @staticmethod
    def _keeping_the_graph(right: Any) -> Any:
        def reset(self: Reducer) -> None:
            static = self._static
            right(self)
            self._static = static

        return reset

    patched = swap(Reducer, "_reset_state", _keeping_the_graph)


@breaks("ddp/functional-transforms", says="AttributeError")
class TakesTransformsForSteps(DDPMutant):
    patched = instead(api, "transforms_are_active", lambda: False)


@breaks("ddp/signature", says="missing or with another default: .*bucket_cap_mb=None")
class TakesOptionsByNameAlone(DDPMutant):
    patched = constructor(
        lambda right: lambda self, module, **options: right(self, module, **options)
    )


@breaks("ddp/is-a-module", says="what it is: rank 0 is wrong")
class CountsItsCapInMegabytes(DDPMutant):
    @staticmethod
    def _in_megabytes(ddp: Any, *_: Any, **__: Any) -> None:
        ddp.bucket_bytes_cap //= 2**20

    patched = afterwards(DistributedDataParallel, "__init__", _in_megabytes)


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

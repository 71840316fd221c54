"""Mutants of conformance/spec/comm_hooks/memory.py."""

from __future__ import annotations

from typing import Any

from impl.ddp.iteration.reduction import BucketReduction
from impl.ddp.wrapper.api import DistributedDataParallel
from tests.mutants.ddp.kit import DDPMutant, afterwards, beforehand
from tests.mutants.kit import breaks

_kept: list[Any] = []


@breaks("comm_hooks/freed", says="still there: the wrapper")
class AHookKeepsTheWrapper(DDPMutant):
    patched = afterwards(
        DistributedDataParallel, "register_comm_hook", lambda self, *_: _kept.append(self)
    )


@breaks("comm_hooks/steady-memory", says="32 steps have left memory")
class KeepsResultsOfHooks(DDPMutant):
    @staticmethod
    def _keep(self: BucketReduction, bucket: Any) -> None:
        if self.hook is not None:
            _kept.append(bucket.buffer.clone())

    patched = beforehand(BucketReduction, "deliver", _keep)

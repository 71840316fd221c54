"""Mutants of conformance/spec/ddp/training_modes.py."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

from impl.ddp.iteration.autograd_hooks import AccumulatorHooks
from impl.ddp.iteration.reducer import Reducer
from impl.ddp.wrapper import api
from impl.ddp.wrapper.api import DistributedDataParallel
from tests.mutants.ddp.kit import DDPMutant, afterwards, instead, swap
from tests.mutants.kit import breaks


@breaks("ddp/inference", says="another output")
class AnotherOutputWithoutGradMode(DDPMutant):
    patched = swap(
        DistributedDataParallel,
        "forward",
        lambda right: lambda *args: right(*args) * (1 if torch.is_grad_enabled() else 2),
    )


@breaks("ddp/module-hooks", says="calls: rank 0 is wrong")
class RunsTheModuleTwice(DDPMutant):
    @staticmethod
    def _twice(right: Any) -> Any:
        def forward(self: Any, *args: Any) -> Any:
            with torch.no_grad():
                self.module(*args)
            return right(self, *args)

        return forward

    patched = swap(DistributedDataParallel, "forward", _twice)


@breaks("ddp/constructed-without-grad-mode", says="gradient: rank 0 is wrong")
class NeedsGradModeAtConstruction(DDPMutant):
    @staticmethod
    def _hear_nothing(reducer: Reducer, *_: Any) -> None:
        if not torch.is_grad_enabled():
            reducer._hooks.remove()

    patched = afterwards(Reducer, "__init__", _hear_nothing)


@breaks("ddp/converted-module", says="not averaged")
class DoesNotSeeConversions(DDPMutant):
    patched = instead(AccumulatorHooks, "are_stale", lambda self: False)


@breaks("ddp/functional-call", says="the result is|was touched")
class ComputesWithItsOwnParameters(DDPMutant):
    patched = swap(
        DistributedDataParallel,
        "forward",
        lambda right: lambda self, *args: right(self, *args) * 0 + 3,
    )


def _in_full(right: Any) -> Any:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", enabled=False):
            return right(self, *args, **kwargs)

    return forward


@breaks("ddp/autocast", says="dtype: rank 0 is wrong")
class ForwardLeavesAutocast(DDPMutant):
    patched = swap(DistributedDataParallel, "forward", _in_full)


def _compress(ddp: DistributedDataParallel, *_: Any, **__: Any) -> None:
    ddp.register_comm_hook(None, bf16_compress_hook)


@breaks("ddp/autocast", says="gradients: rank 0 is wrong")
class SendsWhatAutocastComputes(DDPMutant):
    """Gradients are reduced in the precision in which they were computed."""

    patched = afterwards(DistributedDataParallel, "__init__", _compress)


@breaks("ddp/tensors-made-in-forward", says="raised AttributeError: 'NoneType'")
class EveryOutputHasAHistory(DDPMutant):
    @staticmethod
    def _notify(outputs: Any, notify: Any) -> None:
        for output in outputs:
            output.grad_fn.register_prehook(lambda _: notify())

    patched = instead(api, "notify_at", _notify)

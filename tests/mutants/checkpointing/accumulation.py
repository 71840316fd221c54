"""Mutants of conformance/spec/checkpointing/accumulation.py."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from impl.torch_private import is_backward_running
from tests.mutants.checkpointing.kit import ANY_LAYER, ExchangesNothing
from tests.mutants.kit import breaks
from tests.mutants.wrappers import WrapperMutant


@breaks("checkpointing/input-gradient", says=r"gradient of the input: rank \d is wrong")
class AveragesInputGradients(WrapperMutant):
    """The gradient of the input is averaged over the ranks."""

    def forward(self, x: Tensor) -> Any:
        def average(grad: Tensor) -> Tensor:
            total = grad.clone()
            dist.all_reduce(total)
            return total / dist.get_world_size()

        x.register_hook(average)
        return super().forward(x)


@breaks("checkpointing/accumulation", says=r"round 1, .*: rank \d is wrong")
class LosesGradientsOfNoSync(WrapperMutant):
    """Gradients that were accumulated under no_sync are lost when it ends."""

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        with super().no_sync():
            yield
        self.zero_grad()


@breaks("checkpointing/accumulation", says=r"round 1, .*: rank \d is wrong")
class RecomputationIgnoresNoSync(WrapperMutant):
    """A forward pass that runs again in backward exchanges gradients, also under no_sync."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        held = self.require_backward_grad_sync
        self.require_backward_grad_sync = held or is_backward_running()
        try:
            return super().forward(*args, **kwargs)
        finally:
            self.require_backward_grad_sync = held


@breaks("checkpointing/a-ranks-own-choice", says=r"checkpoints differ: \['', 'non-reentrant'")
class RefusesRanksWithoutCheckpoints(WrapperMutant):
    """Ranks with checkpoints refuse ranks without."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module, **options)
        kinds = [""] * dist.get_world_size()
        dist.all_gather_object(kinds, module.how)
        if len(set(kinds)) > 1:
            raise RuntimeError(f"checkpoints differ: {kinds}")


@breaks("checkpointing/input-without-gradient", says=ANY_LAYER)
class DoesNotAverageTheFirstLayer(ExchangesNothing):
    """The first layer's gradients are the rank's own."""

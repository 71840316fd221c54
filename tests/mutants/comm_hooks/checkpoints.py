"""Mutants of conformance/spec/comm_hooks/checkpoints.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from tests.mutants.kit import breaks
from tests.mutants.wrappers import WrapperMutant


@breaks("comm_hooks/checkpoints", says=r"gradient of .* in step 1: rank \d is wrong")
class DoesNotCallTheHookInTheFirstStep(WrapperMutant):
    """A communication hook is called from the second step on."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module, **options)
        self.passes: list[str] = []

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.passes.append("forward")
        return super().forward(*args, **kwargs)

    def register_comm_hook(self, state: Any, hook: Callable[..., Any]) -> None:
        passes, group = self.passes, self.process_group

        super().register_comm_hook(
            state,
            lambda state, bucket: (
                hook(state, bucket) if passes[1:] else allreduce_hook(group, bucket)
            ),
        )

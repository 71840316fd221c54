"""Mutants of conformance/spec/checkpointing/sharing.py."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.mutants.checkpointing.kit import (
    LAST_LAYER,
    LeavesOutWhatRunsAgain,
    NeverStatic,
    TakesEveryGraphForStatic,
)
from tests.mutants.kit import breaks
from tests.mutants.wrappers import WrapperMutant


@breaks("checkpointing/by-turns", says=r"Your training graph has changed")
@breaks("checkpointing/by-turns-shared-weights", says=r"Your training graph has changed")
class ExpectsTheFirstStepsLayer(TakesEveryGraphForStatic):
    """The layer of the first step is expected in all steps."""


@breaks("checkpointing/twice-static", says=r"Expected to mark a variable ready only once")
@breaks("checkpointing/shared-weights-static", says=r"Expected to mark a variable ready only once")
class StaticGraphDoesNotHelp(NeverStatic):
    """A static graph allows neither layers that run twice nor weights that layers share."""


@breaks("checkpointing/reduced-once", says=r"step 1 reduced \d+ gradients of 15")
class ReducesWheneverAGradientGrows(WrapperMutant):
    """A hook on each parameter exchanges its gradient, besides its bucket."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module, **options)
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(self._exchange)

    def _exchange(self, parameter: Tensor) -> None:
        dist.all_reduce(torch.zeros_like(parameter), group=self.process_group)


@breaks("checkpointing/parameter-hooks", says=r"calls of each parameter's hook: rank 0 is wrong")
class CallsHooksTwice(WrapperMutant):
    """Hooks on a parameter of the wrapper are called twice instead of once."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module, **options)
        for parameter in module.parameters():
            register = parameter.register_post_accumulate_grad_hook
            twice = functools.partial(self._register_twice, register)
            vars(parameter)["register_post_accumulate_grad_hook"] = twice

    @staticmethod
    def _register_twice(register: Callable[[Any], Any], hook: Callable[[Tensor], None]) -> Any:
        register(hook)
        return register(hook)


@breaks("checkpointing/no-more-communication", says=r"operations: rank 0 is wrong")
class IssuesAnAllReduceForEachLayer(WrapperMutant):
    """An all_reduce of one element is issued whenever a layer runs."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module, **options)
        for layer in module.modules():
            if isinstance(layer, nn.Linear):
                layer.register_forward_hook(self._meet)

    def _meet(self, *_: Any) -> None:
        dist.all_reduce(torch.zeros(1), group=self.process_group)


@breaks("checkpointing/twice", says=LAST_LAYER)
@breaks("checkpointing/shared-weights", says=LAST_LAYER)
class LeavesOutLayersThatRunAgain(LeavesOutWhatRunsAgain):
    """What a checkpoint runs again is not averaged, such as the bias beside a shared weight."""

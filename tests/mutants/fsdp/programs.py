"""Mutants of conformance/spec/fsdp/programs.py."""

from __future__ import annotations

from typing import Any

import torch

from impl.fsdp import api
from tests.mutants.fsdp.kit import Swapped
from tests.mutants.kit import breaks


def _clearing(right: Any) -> Any:
    def wrong(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = right(self, *args, **kwargs)
        if not torch.is_grad_enabled():
            for param in self.parameters():
                param.grad = None
        return output

    return wrong


@breaks("fsdp/any-order", says="is wrong")
class AnEvaluationClearsGradients(Swapped):
    """Gradients that are kept from one step to the next are lost if a forward under no_grad comes
    between."""

    swaps = ((api.FullyShardedDataParallel, "forward", _clearing),)

"""Mutants of conformance/spec/checkpointing/resuming.py."""

from __future__ import annotations

from typing import Any

from torch import nn

from tests.mutants.checkpointing.saving import LoadsNoBuffers
from tests.mutants.kit import breaks
from tests.mutants.wrappers import WrapperMutant


@breaks("saving/resume", says=r"state: rank 0 is wrong[\s\S]*running_mean")
class ResumesWithoutStatistics(LoadsNoBuffers):
    """Training continues with the statistics of a new model."""


@breaks("saving/resume-across-wrappers", says=r"before\.weight: rank \d is wrong")
class AddsUpGradients(WrapperMutant):
    """Gradients are added up over the ranks, not averaged."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module, **options)
        for parameter in module.parameters():
            parameter.register_hook(lambda grad: grad * 2)


@breaks("saving/another-number-of-ranks", says=r"rank \d is wrong")
class DividesByHalfTheRanks(AddsUpGradients):
    """Divides by half the number of ranks."""

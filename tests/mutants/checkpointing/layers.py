"""Mutants of conformance/spec/checkpointing/layers.py."""

from __future__ import annotations

from typing import Any

from torch import nn

from tests.mutants.checkpointing.kit import (
    ANY_LAYER,
    LAST_LAYER,
    DividesByItsRuns,
    ExchangesNothing,
    LeavesOutWhatRunsAgain,
    NeverStatic,
)
from tests.mutants.kit import breaks
from tests.mutants.wrappers import WrapperMutant


@breaks("checkpointing/once", says=r"gradient of layers\.1\.weight in step 1: rank \d is wrong")
@breaks("checkpointing/whole-module", says=LAST_LAYER)
@breaks("checkpointing/nested", says=LAST_LAYER)
@breaks("checkpointing/in-segments", says=LAST_LAYER)
class LeavesOutCheckpointedLayers(LeavesOutWhatRunsAgain):
    """Layers that a checkpoint runs again are not averaged."""


@breaks("checkpointing/every-layer", says=r"gradient of .*: rank \d is wrong")
class AveragesNoLayer(ExchangesNothing):
    """Each rank keeps its own gradients of every layer."""


@breaks("checkpointing/around-the-wrapper", says=r"gradient of .*: rank \d is wrong")
@breaks("checkpointing/around-shared-weights", says=ANY_LAYER)
class DividesByTwoWhenItRunsAgain(DividesByItsRuns):
    """A wrapper that a checkpoint runs again divides by two."""


@breaks("checkpointing/frozen-layer", says=r"rank 0 has one, and nobody used it")
class UnfreezesLayers(WrapperMutant):
    """All parameters require gradients once they are wrapped."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module.requires_grad_(), **options)


@breaks("checkpointing/unused-parameters", says=r"Expected to have finished reduction")
class IgnoresFindUnusedParameters(WrapperMutant):
    """Takes find_unused_parameters and ignores it."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module, **{**options, "find_unused_parameters": False})


@breaks("checkpointing/unused-parameters-static", says=r"(?i)ready only once|finished reduction")
class StaticGraphDoesNotHandleUnusedParameters(NeverStatic):
    """A static graph does not help with parameters that no rank uses."""

"""Wrappers whose mistakes show only in certain layers, or where layers run in a certain way."""

from __future__ import annotations

from tests.mutants.checkpointing.refused import (
    DividesByItsRuns,
    ExchangesNothing,
    LeavesOutWhatRunsAgain,
    NeverStatic,
    TakesEveryGraphForStatic,
)
from tests.mutants.kit import breaks

_LAST_LAYER = r"gradient of layers\.1\.\w+ in step 1: rank \d is wrong"
_ANY_LAYER = r"gradient of .*: rank \d is wrong"


@breaks("checkpointing/whole-module", says=_LAST_LAYER)
class LeavesOutTheEndOfACheckpoint(LeavesOutWhatRunsAgain):
    """The second layer of one checkpoint is not averaged."""


@breaks("checkpointing/nested", says=_LAST_LAYER)
class LeavesOutTheInnerCheckpoint(LeavesOutWhatRunsAgain):
    """A layer in a checkpoint within a checkpoint is not averaged."""


@breaks("checkpointing/in-segments", says=_LAST_LAYER)
class LeavesOutOneOfASegment(LeavesOutWhatRunsAgain):
    """A layer amid a segment is not averaged."""


@breaks("checkpointing/twice", says=_LAST_LAYER)
class LeavesOutWhatRunsTwice(LeavesOutWhatRunsAgain):
    """A layer that two checkpoints run is not averaged."""


@breaks("checkpointing/shared-weights", says=_LAST_LAYER)
class LeavesOutTheSecondOwner(LeavesOutWhatRunsAgain):
    """A layer's own bias is not averaged, its shared weight is."""


@breaks("checkpointing/structured", says=_ANY_LAYER)
class LosesContainers(ExchangesNothing):
    """What comes out of a checkpoint in a dictionary is averaged over nobody."""


@breaks("checkpointing/any-parts", says=_ANY_LAYER)
class KeepsWhatItComputed(ExchangesNothing):
    """No gradient is averaged, whatever the checkpoints are."""


@breaks("checkpointing/input-without-gradient", says=_ANY_LAYER)
class KeepsTheFirstLayer(ExchangesNothing):
    """The first layer's gradients are the rank's own."""


@breaks("checkpointing/around-shared-weights", says=_ANY_LAYER)
class CountsRunsOfSharedWeights(DividesByItsRuns):
    """A wrapper that runs again divides by two."""


@breaks("checkpointing/shared-weights-static", says=r"Expected to mark a variable ready only once")
class SharedWeightsAreNotStatic(NeverStatic):
    """A static graph does not help with weights that layers share."""


@breaks("checkpointing/unused-parameters-static", says=r"(?i)ready only once|finished reduction")
class UnusedParametersAreNotStatic(NeverStatic):
    """A static graph does not help with parameters that nobody uses."""


@breaks("checkpointing/by-turns-shared-weights", says=r"Your training graph has changed")
class FirstTurnIsEveryTurn(TakesEveryGraphForStatic):
    """The layer of the first step is expected in all steps."""


@breaks("checkpointing/reentrant-by-turns-refused", says=r"does not match 'Expected to mark")
class BlamesTheGraph(TakesEveryGraphForStatic):
    """Layers by turns in reentrant checkpoints are refused at the second step, in other words."""

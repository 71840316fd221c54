"""Mutants of conformance/spec/fully_shard/memory.py."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from impl.fully_shard import collectives
from impl.fully_shard.shared import Shared
from impl.fully_shard.state import State
from tests.mutants.fsdp.kit import Swapped, nothing
from tests.mutants.fully_shard.kit import first, then
from tests.mutants.kit import breaks

_kept: list[Tensor] = []


def _keep(rows: Tensor, *_: Any) -> None:
    _kept.append(rows)


def _forget(*_: Any) -> None:
    _kept.clear()


@breaks("fully_shard/peak-of-a-forward", says="forward: memory of")
class KeepsWhatWasGathered(Swapped):
    """The results of all-gathers are kept until the step is over."""

    swaps = ((collectives, "gather", then(_keep)), (State, "_end_step", first(_forget)))


@breaks("fully_shard/peak-of-a-step", says="step: memory of")
class KeepsWhatIsReduced(Swapped):
    """The inputs of reduce-scatters are kept until the step is over."""

    swaps = ((Shared, "make_room", nothing),)


@breaks("fully_shard/left-by-a-step", says="left: memory of")
class KeepsWhatWasGatheredForGood(Swapped):
    """The results of all-gathers are never freed."""

    swaps = ((collectives, "gather", then(_keep)),)

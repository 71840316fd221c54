"""Faults of FSDP's several backwards: only the first counts, or the last."""

from __future__ import annotations

from impl.fsdp import gradients
from tests.faults.fsdp_kit import Swapped, always, nothing
from tests.faults.kit import breaks


@breaks("fsdp/several-backwards", says="is wrong")
class LosesWhatNoHookHasTaken(Swapped):
    """The first backward has removed the hooks."""

    swaps = ((gradients, "is_left_behind", always(False)),)


@breaks("fsdp/retained-graph", says="is wrong")
class TheLastBackwardReplacesTheOthers(Swapped):
    swaps = ((gradients, "_put_aside", nothing),)

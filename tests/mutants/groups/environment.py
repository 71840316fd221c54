"""Mutants of conformance/spec/groups/environment.py."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from tests.mutants.kit import ForwardingGroup, breaks
from tests.mutants.replacing import Replacing


@breaks("debug_level/from-environment", says=r"DID NOT RAISE ValueError")
class UnknownLevelsAreOff(Replacing):
    """An unknown level is taken for OFF."""

    @staticmethod
    def set_debug_level_from_env(right: Any) -> None:
        try:
            right()
        except ValueError:
            dist.set_debug_level(dist.DebugLevel.OFF)


@breaks("debug_level/set", says=r"at \[0\]: got 'OFF', want 'INFO'")
class TheEnvironmentAloneSetsTheLevel(Replacing):
    @staticmethod
    def set_debug_level(right: Any, level: Any) -> None:
        dist.set_debug_level_from_env()


@breaks("debug_level/detail", says=r"at \[0\].*\n.*got 6\.0, want 3\.0")
class DetailReducesTwice(ForwardingGroup):
    """At the level DETAIL, a reduction runs twice on the same tensors."""

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        if dist.get_debug_level() == dist.DebugLevel.DETAIL:
            super().allreduce(tensors, opts).wait()
        return super().allreduce(tensors, opts)


@breaks("node_local_rank/from-environment", says="DID NOT RAISE RuntimeError")
class TheLocalRankIsZero(Replacing):
    """Without LOCAL_RANK this is the first of its node."""

    @staticmethod
    def get_node_local_rank(right: Any, fallback: int | None = None) -> int:
        return int(right(fallback or 0))

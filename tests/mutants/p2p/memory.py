"""Mutants of conformance/spec/p2p/memory.py."""

from __future__ import annotations

from typing import Any

from tests.mutants.collectives.kit import Keeps
from tests.mutants.kit import breaks


@breaks("p2p/keeps-nothing", says=r"rank 0 still has tensors of 100 of 100 operations")
class RemembersWhatItSent(Keeps):
    """Messages that were sent are never released."""

    def send(self, tensors: Any, dst: int, tag: int) -> Any:
        self.kept += tensors
        return super().send(tensors, dst, tag)

"""Helpers that mutants of several chapters of p2p share."""

from __future__ import annotations

from typing import Any

from impl.gloo import ProcessGroupGloo
from tests.mutants.kit import GroupMutant
from tests.mutants.replacing import Wrapped


class Messages(GroupMutant, ProcessGroupGloo):
    """Every handle of a message is of the class `handle`."""

    base = "impl"
    handle: Any = Wrapped

    def send(self, tensors: Any, dst: int, tag: int = 0) -> Any:
        return self.handle(super().send(tensors, dst, tag))

    def recv(self, tensors: Any, src: int, tag: int = 0) -> Any:
        return self.handle(super().recv(tensors, src, tag))

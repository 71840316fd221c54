"""Helpers that mutants of several chapters of faults share."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, ClassVar

from conformance.power.handles import Relayed
from tests.mutants.kit import ForwardingGroup


class Forgiving(Relayed):
    """Its wait returns, whatever happened."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        try:
            return super().wait(timeout)
        except RuntimeError:
            return True


class ChangesReductions(ForwardingGroup):
    """Hands out handles of one class for all_reduce."""

    handle: ClassVar[type[Relayed]] = Relayed

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        return self.handle(super().allreduce(tensors, opts))


class WaitsFor(Relayed):
    """A handle whose wait has a timeout of its own."""

    def __init__(self, inner: Any, timeout: timedelta) -> None:
        super().__init__(inner)
        self.timeout = timeout

    def wait(self, timeout: timedelta | None = None) -> bool:
        return super().wait(timeout or self.timeout)

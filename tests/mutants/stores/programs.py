"""Mutants of conformance/spec/stores/programs.py."""

from __future__ import annotations

from tests.mutants.kit import breaks
from tests.mutants.stores.kit import StoreMutant


@breaks("store/any-program", says="values at the end")
class ReplacesWhatItAppendsTo(StoreMutant):
    def append(self, key: str, value: str) -> None:
        self.inner.set(key, value)

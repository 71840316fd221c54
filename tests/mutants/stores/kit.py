"""How mutants of stores are written: one operation of one of torch's stores is replaced."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from conformance.stores import hash_store, tcp_store
from conformance.target import Target, load_target
from tests.mutants.kit import Mutant


class StoreMutant(Mutant):
    """Hands everything to a store of torch's: a HashStore, or a TCPStore if there are more ranks.

    Threads of a HashStore wait alone, and its values have any size; a TCPStore names keys.
    """

    names_keys: ClassVar[bool] = False

    def __init__(self, inner: Any, rank: int) -> None:
        self.inner = inner
        self.rank = rank

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    @classmethod
    def make(cls, **place: Any) -> Any:
        """The store as a target makes it."""
        shared = cls.names_keys or place["world_size"] > 1
        return cls((tcp_store if shared else hash_store)(**place), place["rank"])

    @classmethod
    def target(cls) -> Target:
        return replace(
            load_target("torch"),
            name=cls.__name__,
            store=f"{cls.__module__}:{cls.__qualname__}.make",
            deviations=(),
        )

"""Chooses a few blocked cases to run nevertheless, to tell why the rule they rest on is broken."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from conformance.report.blame import TELLING
from conformance.run.facets import Facets

_KINDS = frozenset({"op", "reduce_op", "dtype", "feature", "chapter"})
_CASES_MAX = 40
_BUDGET_S = 30.0
# Of those that may say why operations are wrong. The machine may be slow; only hangs take so long.
_TELLING_MAX = 16
_TELLING_BUDGET_S = 120.0


@dataclass(slots=True)
class Diagnoses:
    """The blocked cases that one process has run: few, each with something new, and not for long.

    What they show is told in the sentence of blame alone; their requirements stay blocked.
    """

    seconds: float = 0.0
    count: int = 0
    _seen: set[tuple[str, str]] = field(default_factory=set)
    _told: Counter[tuple[str, str]] = field(default_factory=Counter)

    def take(self, facets: Facets) -> bool:
        """Whether to run a blocked case that is about this; then the next of its kind is not."""
        telling = TELLING.intersection(facets)
        if telling:
            self._told.update(telling)
            few = all(self._told[facet] <= _TELLING_MAX for facet in telling)
            return few and self.seconds < _TELLING_BUDGET_S
        new = {facet for facet in facets if facet[0] in _KINDS} - self._seen
        if not new or self.count >= _CASES_MAX or self.seconds >= _BUDGET_S:
            return False
        self._seen |= new
        self.count += 1
        return True

"""Which blocked cases run nevertheless, to tell the causes of a broken root apart."""

from __future__ import annotations

from dataclasses import dataclass, field

from conformance.report.blame import TELLING
from conformance.run.facets import Facets

_KINDS = frozenset({"op", "reduce_op", "dtype", "feature", "chapter"})
_CASES_MAX = 40
_BUDGET_S = 30.0


@dataclass(slots=True)
class Diagnoses:
    """The blocked cases that one process has run: few, each with something new, and not for long.

    What they show is told in the sentence of blame alone; their requirements stay blocked.
    """

    seconds: float = 0.0
    count: int = 0
    _seen: set[tuple[str, str]] = field(default_factory=set)

    def take(self, facets: Facets) -> bool:
        """Whether to run a blocked case that is about this; then the next of its kind is not."""
        new = {facet for facet in facets if facet[0] in _KINDS} - self._seen
        has_room = new and self.count < _CASES_MAX
        if self.seconds >= _BUDGET_S or not (has_room or TELLING.intersection(facets)):
            return False
        self._seen |= new
        self.count += 1
        return True

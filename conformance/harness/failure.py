"""`RanksFailed`, raised if not every rank returned; which of its errors mean 'not supported'."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from conformance.harness.outcome import (
    Died,
    Lacking,
    NotTold,
    Outcome,
    Raised,
    Refusal,
    Returned,
    describe_hang,
    verdict_of,
)
from conformance.verdict import Verdict


class RanksFailed(Exception):
    """Not every rank returned. All outcomes are kept; the worst one is the verdict."""

    def __init__(self, doing: str, outcomes: Sequence[Outcome]) -> None:
        super().__init__(doing, outcomes)
        self.doing = doing
        self.outcomes = list(outcomes)

    @property
    def verdict(self) -> Verdict:
        return verdict_of(self.outcomes)

    @property
    def brief(self) -> str:
        """The worst that became of a rank, in one line."""
        hang = describe_hang(self.outcomes)
        if hang and self.verdict is Verdict.TIMEOUT:
            return hang
        worst = (f"rank {r} {o}" for r, o in enumerate(self.outcomes) if o.verdict is self.verdict)
        return next(worst)

    def __str__(self) -> str:
        lines = [f"{self.doing}: {self.verdict}"]
        lines += [f"  rank {rank}  {outcome}" for rank, outcome in enumerate(self.outcomes)]
        hang = describe_hang(self.outcomes)
        return "\n".join([*lines, *([hang] if hang else [])])

    def __reduce__(self) -> Any:
        return type(self), (self.doing, self.outcomes)


def lack_of(outcomes: Sequence[Outcome]) -> str:
    """What a rank needed, and the target or its device does not have, or ""."""
    raised = (outcome for outcome in outcomes if isinstance(outcome, Raised))
    return next((outcome.message for outcome in raised if outcome.is_a(Lacking)), "")


def refusals_of(outcomes: Sequence[Outcome]) -> list[Refusal]:
    """What ranks refused, one line for each such rank; none if a rank died.

    A rank refuses by raising, in an operation or out of the function. What becomes of the others is
    a consequence: they wait for it, lack its data, or are done. An assertion of the case is no
    refusal: it means that data arrived and was wrong.
    """
    if any(isinstance(outcome, Died | NotTold) for outcome in outcomes):
        return []
    found = []
    for rank, outcome in enumerate(outcomes):
        if not isinstance(outcome, Returned | Raised):
            continue
        if outcome.refused:
            found.append(replace(outcome.refused, said=f"rank {rank}: {outcome.refused}"))
        elif isinstance(outcome, Raised) and not _is_assertion(outcome):
            found.append(replace(outcome.refused, said=f"rank {rank} {outcome}"))
    return found


def _is_assertion(outcome: Raised) -> bool:
    return outcome.is_a(AssertionError) or outcome.is_a(pytest.fail.Exception)

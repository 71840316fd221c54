"""Checks for cases in which ranks should raise or die: the errors, and what the others return."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any

from conformance.checks import CheckFailed
from conformance.harness.failure import RanksFailed
from conformance.harness.outcome import NotAsked, Outcome, Raised, Returned


def assert_raised(
    outcomes: Sequence[Outcome],
    *kinds: type[BaseException],
    match: str = "",
    but: Collection[int] = (),
    what: str = "",
) -> None:
    """Every rank raised one of these exceptions, RuntimeError or ValueError if none is named.

    match: what each message must contain, as a regular expression.
    but: ranks of which nothing is asked, such as one that was killed on purpose.
    what: a word for what the ranks did, where the case does several things.
    Raises RanksFailed, which keeps the verdict, if a rank died, was still running or could not be
    asked; CheckFailed if one returned or raised something else.
    """
    kinds = kinds or (RuntimeError, ValueError)
    head = f"{what}: " if what else ""
    asked = {rank: outcome for rank, outcome in enumerate(outcomes) if rank not in but}
    if not all(isinstance(outcome, Returned | Raised) for outcome in asked.values()):
        raise RanksFailed(f"{head}ranks were to raise", _but(outcomes, but))
    names = " or ".join(kind.__name__ for kind in kinds)
    for rank, outcome in asked.items():
        if not isinstance(outcome, Raised) or not any(outcome.is_a(kind) for kind in kinds):
            raise CheckFailed(f"{head}rank {rank} was to raise {names}, and it {outcome}", rank)
        if not re.search(match, outcome.message):
            raise CheckFailed(f"{head}rank {rank} {outcome}, which does not match {match!r}", rank)


def returned(outcomes: Sequence[Outcome], doing: str, *, but: Collection[int] = ()) -> list[Any]:
    """What the ranks returned, in their order, without the ranks of which nothing is asked.

    doing: what they did, in a few words.
    Raises RanksFailed, which keeps the verdict, if one of them did not return.
    """
    asked = [outcome for rank, outcome in enumerate(outcomes) if rank not in but]
    values = [outcome.value for outcome in asked if isinstance(outcome, Returned)]
    if len(values) < len(asked):
        raise RanksFailed(doing, _but(outcomes, but))
    return values


def _but(outcomes: Sequence[Outcome], but: Collection[int]) -> list[Outcome]:
    return [NotAsked(outcome) if r in but else outcome for r, outcome in enumerate(outcomes)]

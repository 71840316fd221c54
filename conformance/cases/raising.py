"""Checks for cases in which ranks are meant to raise."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from conformance.checks import CheckFailed
from conformance.harness.failure import RanksFailed
from conformance.harness.outcome import Died, Outcome, Raised, Returned, StillRunning


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
    Raises RanksFailed, which keeps the verdict, if a rank died or was still running; CheckFailed
    if one returned or raised something else.
    """
    kinds = kinds or (RuntimeError, ValueError)
    head = f"{what}: " if what else ""
    asked = {rank: outcome for rank, outcome in enumerate(outcomes) if rank not in but}
    if any(isinstance(outcome, Died | StillRunning) for outcome in asked.values()):
        excused = [
            asked.get(rank, Returned("as the case wants it")) for rank in range(len(outcomes))
        ]
        raise RanksFailed(f"{head}ranks were to raise", excused)
    names = " or ".join(kind.__name__ for kind in kinds)
    for rank, outcome in asked.items():
        if not isinstance(outcome, Raised) or not any(outcome.is_a(kind) for kind in kinds):
            raise CheckFailed(f"{head}rank {rank} was to raise {names}, and it {outcome}", rank)
        if not re.search(match, outcome.message):
            raise CheckFailed(f"{head}rank {rank} {outcome}, which does not match {match!r}", rank)

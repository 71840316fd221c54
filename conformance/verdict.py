"""Verdicts of cases and requirements, and how several verdicts are combined into one."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum


class Verdict(str, Enum):
    """The words of a certificate. Their values are what is printed and what stands in the JSON."""

    HOLDS = "holds"
    BROKEN = "broken"
    TIMEOUT = "timeout"
    CRASHED = "crashed"
    BLOCKED = "blocked"
    NOT_CLAIMED = "not claimed"
    NOT_EXERCISED = "not exercised"
    DEVIATION = "deviation"
    UNKNOWN = "unknown"

    def __str__(self) -> str:
        return self.value


# Worst first. A harness fault comes before everything: it means that nothing was learnt, so no
# other verdict on the same requirement can be trusted to be the whole truth. A case that was not
# claimed says nothing against those that hold, and comes after them.
_WORST_FIRST = (
    Verdict.UNKNOWN,
    Verdict.CRASHED,
    Verdict.TIMEOUT,
    Verdict.BROKEN,
    Verdict.BLOCKED,
    Verdict.DEVIATION,
    Verdict.HOLDS,
    Verdict.NOT_CLAIMED,
    Verdict.NOT_EXERCISED,
)

# What the target did wrong, as seen: a deviation may excuse these, and only these.
FAILURES = frozenset({Verdict.BROKEN, Verdict.TIMEOUT, Verdict.CRASHED})

# With any of these a target is not conformant.
REFUSES_CERTIFICATE = FAILURES | {Verdict.BLOCKED}


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """The verdict that decides; `NOT_EXERCISED` where there is none at all."""
    return min(verdicts, key=_WORST_FIRST.index, default=Verdict.NOT_EXERCISED)

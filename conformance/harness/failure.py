"""The failure of a run from which not every rank came back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from conformance.harness.outcome import Outcome, Raised, Returned, describe_hang, verdict_of
from conformance.verdict import Verdict


@dataclass(frozen=True, slots=True)
class Bystander:
    """What a rank returns if its case asks nothing of it, such as one outside of the group.

    Where the target refuses the operation, such a rank has nothing to refuse.
    """


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
    def is_clean_refusal(self) -> bool:
        """Whether the target refused: every rank that was asked raised, and none of them in an
        assertion of the case, which would mean that it got a wrong result."""
        asked = [o for o in self.outcomes if not _is_bystander(o)]
        raised = [o for o in asked if isinstance(o, Raised)]
        asserted = any(o.is_a(AssertionError) or o.is_a(pytest.fail.Exception) for o in raised)
        return bool(raised) and len(raised) == len(asked) and not asserted

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


def _is_bystander(outcome: Outcome) -> bool:
    return isinstance(outcome, Returned) and isinstance(outcome.value, Bystander)

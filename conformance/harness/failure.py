"""How a run fails that not every rank came back from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from conformance.harness.outcome import Outcome, Raised, describe_hang, verdict_of
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
    def is_clean_refusal(self) -> bool:
        """Whether the target refused: a rank raised, and none hung, died or disagreed."""
        raised = [o for o in self.outcomes if isinstance(o, Raised)]
        return (
            bool(raised)
            and not any(o.verdict in (Verdict.CRASHED, Verdict.UNKNOWN) for o in self.outcomes)
            and not any(o.is_a(AssertionError) or o.is_a(pytest.fail.Exception) for o in raised)
            and not describe_hang(self.outcomes)
        )

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

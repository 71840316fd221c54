"""A property that fails ends soon, and still reports an example that fails."""

from __future__ import annotations

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from conformance.harness.shrink_limit import ShrinkLimit, limits_shrinking


class FakeRanks:
    """Counts the runs that were really made."""

    def __init__(self) -> None:
        self.shrink_limit: ShrinkLimit[int] = ShrinkLimit()
        self.runs = 0

    def run(self, value: int, *, hangs_from: int = 1 << 62) -> int:
        payloads = [str(value).encode()]
        known = self.shrink_limit.recall(payloads)
        if known is None:
            self.runs += 1
            if value >= hangs_from:
                self.shrink_limit.note(payloads, value, needed_new_processes=True)
                known = value
        if known is not None:
            raise RuntimeError(f"hung at {known}")
        return value


quick = settings(
    max_examples=200,
    database=None,
    derandomize=True,
    report_multiple_bugs=False,
    phases=[Phase.generate, Phase.shrink],
)


@quick
@given(value=st.integers(0, 1 << 60))
def big_numbers_are_wrong(ranks: FakeRanks, value: int) -> None:
    assert ranks.run(value) < 1 << 40, f"{value} is wrong"


@quick
@given(value=st.integers(0, 1 << 60))
def big_numbers_hang(ranks: FakeRanks, value: int) -> None:
    ranks.run(value, hangs_from=1 << 40)


@quick
@given(value=st.integers(0, 1 << 60))
def all_numbers_are_right(ranks: FakeRanks, value: int) -> None:
    ranks.run(value)


for _test in (big_numbers_are_wrong, big_numbers_hang, all_numbers_are_right):
    limits_shrinking(_test)
    limits_shrinking(_test)


def test_a_wrong_result_is_made_smaller_within_a_budget() -> None:
    ranks = FakeRanks()
    with pytest.raises(AssertionError, match="is wrong"):
        big_numbers_are_wrong(ranks=ranks)
    assert 1 < ranks.runs < 400


def test_a_hang_is_not_tried_again_and_again() -> None:
    ranks = FakeRanks()
    with pytest.raises(RuntimeError, match="hung at"):
        big_numbers_hang(ranks=ranks)
    hung = len(ranks.shrink_limit._failed)
    assert hung <= 3


def test_a_property_that_holds_runs_all_its_examples() -> None:
    ranks = FakeRanks()
    all_numbers_are_right(ranks=ranks)
    assert ranks.runs >= 100

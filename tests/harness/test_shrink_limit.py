"""A property that fails ends soon, and still reports an example that fails."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from conformance.harness.shrink_limit import ShrinkLimit, limits_shrinking, unshrunk
from conformance.verdict import Verdict
from tests.harness.kit import Inside


class FakeRanks:
    """Counts the runs that were really made, and the seconds that they would take."""

    def __init__(self, seconds_a_run: float = 0.01, seconds_to_hang: float = 0.5) -> None:
        self.shrink_limit: ShrinkLimit[int] = ShrinkLimit(lambda: self.now)
        self.runs = 0
        self.now = 0.0
        self.wrong: list[tuple[int, float]] = []  # value and time
        self._seconds = seconds_a_run, seconds_to_hang

    def run(self, value: int, *, hangs_from: int = 1 << 62) -> int:
        payloads = [str(value).encode()]
        known = self.shrink_limit.recall(payloads)
        if known is None:
            self.runs += 1
            self.now += self._seconds[value >= hangs_from]
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
    if ranks.run(value) >= 1 << 40:
        ranks.wrong.append((value, ranks.now))
        raise AssertionError(f"{value} is wrong")


def test_a_property_ends_with_the_first_example_that_fails() -> None:
    first, later = FakeRanks(), FakeRanks()
    with unshrunk(big_numbers_are_wrong), pytest.raises(AssertionError):
        big_numbers_are_wrong(first)
    assert len({value for value, _ in first.wrong}) == 1
    with pytest.raises(AssertionError):
        big_numbers_are_wrong(later)
    assert len({value for value, _ in later.wrong}) > 1


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


@pytest.mark.parametrize("seconds", [0.2, 3.0, 60.0])
def test_what_is_slow_and_wrong_is_not_made_smaller_for_minutes(seconds: float) -> None:
    ranks = FakeRanks(seconds)
    with pytest.raises(AssertionError, match="is wrong") as raised:
        big_numbers_are_wrong(ranks=ranks)
    (first, failed_at), *_ = ranks.wrong
    replays = 3  # Hypothesis makes sure that the failure is not flaky, and shows it once more
    assert ranks.now - failed_at <= 20 + replays * seconds
    smallest = min(value for value, _ in ranks.wrong)
    assert f"{smallest} is wrong" in str(raised.value)
    assert smallest < first or seconds == 60


def test_a_hang_of_a_whole_deadline_is_not_made_smaller() -> None:
    ranks = FakeRanks(seconds_to_hang=60.0)
    with pytest.raises(RuntimeError, match="hung at"):
        big_numbers_hang(ranks=ranks)
    assert ranks.now < 70


def test_a_property_that_holds_runs_all_its_examples() -> None:
    ranks = FakeRanks()
    all_numbers_are_right(ranks=ranks)
    assert ranks.runs >= 100


CASE = """
import time

import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings, strategies as st

from conformance import assert_that, covers, world_sizes
from conformance.rule import MUST, Requirement

ONE = Requirement(id="mine/one", level=MUST, profile="faults", says="Yes.", source="me")
wrong_since = []


def sums(me, numel):
    x = torch.ones(numel)
    dist.all_reduce(x)
    return x.tolist()


@covers(ONE)
@world_sizes(2)
@settings(
    derandomize=True,
    database=None,
    report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(numel=st.integers(1, 10_000))
def test_sums(ranks, numel):
    got = ranks.run(sums, numel)
    right = got == [[2.0] * numel] * 2
    now = time.monotonic()
    if not right:
        wrong_since.append(now)
    print(f"after {now - min(wrong_since, default=now):.2f} s: {numel} {right}")
    assert_that(right, f"{numel} elements are wrong")
"""


def test_a_target_that_is_slow_and_wrong_is_broken_within_the_limit(
    inside: Callable[..., Inside],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("conformance.harness.shrink_limit._SECONDS_MAX", 2.0)
    run = inside(CASE, "--target=tests.harness.targets:SLOW_AND_WRONG_WHEN_LARGE")
    assert run.result("mine/one").verdict is Verdict.BROKEN
    tried = re.findall(r"after (\S+) s: (\d+) (\w+)", capsys.readouterr().out)
    # One that had begun, and Hypothesis' own replays of the smallest; without a limit, 13.
    assert sum(float(seconds) > 2.0 for seconds, *_ in tried) < 8
    smallest = min(int(numel) for _, numel, right in tried if right == "False")
    assert f"{smallest} elements are wrong" in run.result("mine/one").reason


def test_what_is_known_to_be_wrong_is_not_made_smaller(
    inside: Callable[..., Inside], capsys: pytest.CaptureFixture[str]
) -> None:
    run = inside(CASE, "--target=tests.harness.targets:KNOWN_TO_BE_WRONG")
    assert run.result("mine/one").verdict is Verdict.DEVIATION
    tried = re.findall(r"s: (\d+) (\w+)", capsys.readouterr().out)
    assert len({numel for numel, right in tried if right == "False"}) == 1

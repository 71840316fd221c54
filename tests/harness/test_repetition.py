"""A failure is the target's only if fresh ranks repeat it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from conformance.harness.outcome import Outcome, Raised, Returned
from conformance.harness.reuse_check import is_sound
from conformance.report.terminal import summary_lines
from conformance.run.repetition import describe_taint, repeat
from conformance.verdict import Verdict
from tests.harness.kit import Inside

CASES = """
import os

import torch
import torch.distributed as dist

from conformance import assert_that, covers, world_sizes
from conformance.rule import MUST, Requirement

def r(name, **more):
    words = dict(level=MUST, profile="faults", says="It holds.", source="a test")
    return Requirement(id=f"mine/{name}", **words, **more)

def spoils(me):
    torch.spoilt = True

def needs_clean_processes(me):
    if hasattr(torch, "spoilt"):
        raise BrokenPipeError("Broken pipe")
    return os.getpid()

def raises(me):
    raise RuntimeError("always")
"""

Run = Callable[..., Inside]


@pytest.mark.usefixtures("own_ranks")
def test_what_an_earlier_case_left_behind_is_no_fault_of_the_next(inside: Run) -> None:
    run = inside(
        CASES
        + """
@covers(r("spoils"))
@world_sizes(2)
def test_spoils(ranks):
    ranks.run(spoils)

@covers(r("honest"))
@world_sizes(2)
def test_honest(ranks):
    ranks.run(needs_clean_processes)
"""
    )
    honest = run.result("mine/honest")
    assert honest.verdict is Verdict.HOLDS
    [case] = honest.cases
    assert "failed once on ranks that had run" in case.tainted
    assert "::test_spoils[ws2] before" in case.tainted
    assert "BrokenPipeError: Broken pipe" in case.tainted
    assert "passed 3 times on fresh ranks" in case.tainted
    assert run.results is not None
    assert [case.case for case in run.results.tainted] == [honest.cases[0].case]
    assert "held against no requirement" in "\n".join(summary_lines(run.results, 1.0))
    assert run.exit_status == 0


def test_what_fails_on_fresh_ranks_too_is_broken_and_told_as_it_failed_there(inside: Run) -> None:
    run = inside(
        CASES
        + """
@covers(r("broken"))
@world_sizes(2)
def test_broken(ranks):
    ranks.run(raises)
"""
    )
    assert run.result("mine/broken").verdict is Verdict.BROKEN
    assert run.result("mine/broken").cases[0].tainted == ""


BY_TURNS = (
    CASES
    + """
times = 0

@covers(r("by-turns"))
@world_sizes(1)
def test_by_turns(ranks, tmp_path):
    global times
    times += 1
    (tmp_path / "made once").mkdir()
    assert_that(times not in {fails}, f"run {times}")
"""
)


@pytest.mark.parametrize(
    ("fails", "verdict"),
    [("(1,)", Verdict.HOLDS), ("(1, 3)", Verdict.BROKEN), ("(1, 4)", Verdict.BROKEN)],
)
def test_one_failure_in_several_repetitions_is_enough(
    inside: Run, fails: str, verdict: Verdict
) -> None:
    run = inside(BY_TURNS.replace("{fails}", fails))
    assert run.result("mine/by-turns").verdict is verdict


AGES = (
    CASES
    + """
from conformance import assert_same_on_all_ranks

def is_old(me, calls=1):
    torch.calls = getattr(torch, "calls", 0) + calls
    return torch.calls > 20

@covers(r("ages"))
@world_sizes(2)
def test_ages(ranks):
    ranks.run(is_old, 20)

@covers(r("young"))
@world_sizes(2)
def test_young(ranks):
    assert_same_on_all_ranks(ranks.run(is_old), want=False)

@covers(r("checked"))
@world_sizes(2)
def test_checked(ranks):
    for old in ranks.run(is_old):
        assert_that(not old, "too late")
"""
)


@pytest.mark.usefixtures("own_ranks")
def test_a_wrong_value_that_comes_with_age_is_the_targets(inside: Run) -> None:
    run = inside(AGES)
    young = run.result("mine/young")
    assert young.verdict is Verdict.BROKEN
    [case] = young.cases
    assert case.failure is not None
    assert "not found in 3 runs on fresh ranks, and found again in run 21" in case.failure.text


@pytest.mark.usefixtures("own_ranks")
def test_what_is_no_value_is_not_looked_for_in_old_processes(inside: Run) -> None:
    run = inside(AGES, "-k", "ages or checked")
    assert run.result("mine/checked").verdict is Verdict.HOLDS


def test_repetitions_can_be_left_out(inside: Run) -> None:
    run = inside(BY_TURNS.replace("{fails}", "(1,)"), "--repetitions=0")
    assert run.result("mine/by-turns").verdict is Verdict.BROKEN


def test_a_repetition_ends_with_the_first_failure() -> None:
    ran = []

    def case() -> None:
        ran.append(1)
        assert len(ran) < 2, "now"

    again = repeat(case, 3)
    assert (again.passed, str(again.error).splitlines()[0], len(ran)) == (1, "now", 2)
    assert repeat(lambda: None, 3).error is None


def test_a_taint_says_after_which_case() -> None:
    assert describe_taint("no", "a.py::test_b", 3) == (
        "failed once on ranks that had run a.py::test_b before (no), and passed 3 times on fresh "
        "ranks"
    )
    assert describe_taint("no", "", 1).startswith("failed once on fresh ranks (no), and passed 1 t")


RAISED = Raised("RuntimeError", "gone", "")


@pytest.mark.parametrize(
    ("outcomes", "sound"),
    [
        ([Returned([1.0, 2.0]), Returned([1.0, 2.0])], True),
        ([Returned([0.0, 1.0]), Returned([0.0, 1.0])], True),
        ([Returned([])] * 3, True),
        ([Returned([1.0, 2.0]), Returned([0.0, 1.0])], False),
        ([Returned([1.0, 2.0]), RAISED], False),
        ([Returned([7.0, 2.0])] * 2, False),
    ],
)
def test_ranks_are_sound_if_a_collective_comes_out_right(
    outcomes: list[Outcome], sound: bool
) -> None:
    assert is_sound(outcomes) is sound


PIDS = """
seen = {}

def pid(me):
    return os.getpid()

def raises_and_is_well(me, port):
    raise RuntimeError("as told")

def raises_and_loses_the_store(me, port):
    import socket
    for name in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(name))) as one:
                if one.family == socket.AF_INET and one.getpeername()[1] == port:
                    one.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
    raise RuntimeError("as told")

@covers(r("before"))
@world_sizes(2)
def test_before(ranks):
    seen["before"] = ranks.run(pid)

@covers(r("raises"))
@world_sizes(2)
def test_raises(ranks):
    port = ranks._pool._store.port
    ranks.outcomes({function}, port)

@covers(r("after"))
@world_sizes(2)
def test_after(ranks):
    assert_that((ranks.run(pid) == seen["before"]) is {kept}, "kept or not")
"""


@pytest.mark.usefixtures("own_ranks")
@pytest.mark.parametrize(
    ("function", "kept"), [("raises_and_is_well", True), ("raises_and_loses_the_store", False)]
)
def test_ranks_that_raised_are_kept_only_if_they_are_sound(
    inside: Run, function: str, kept: bool
) -> None:
    text = PIDS.replace("{function}", function).replace("{kept}", str(kept))
    run = inside(CASES + text, "--repetitions=0")
    assert run.result("mine/after").verdict is Verdict.HOLDS


@pytest.mark.usefixtures("own_ranks")
def test_ranks_that_had_no_part_in_a_failure_need_not_prove_anything(inside: Run) -> None:
    text = """
from tests.harness import targets

def worlds(me):
    return targets.worlds

@covers(r("raises"))
@world_sizes(2)
def test_raises(ranks):
    ranks._pool._ensure(4)
    ranks.outcomes(raises)

@covers(r("after"))
@world_sizes(4)
def test_after(ranks):
    # Two ranks have also been in the world that failed, and in one that proved them sound.
    assert_that(ranks.run(worlds) == [3, 3, 1, 1], str(ranks.run(worlds)))
"""
    run = inside(CASES + text, "--repetitions=0", "--target=tests.harness.targets:COUNTS_WORLDS")
    assert run.result("mine/after").verdict is Verdict.HOLDS

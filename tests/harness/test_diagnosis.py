"""Blocked cases that run nevertheless, and the sentence of blame that they make possible."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from conformance.session.diagnosis import Diagnoses
from conformance.verdict import Verdict
from tests.harness.kit import Inside

CASES = """
import pytest
import torch
import torch.distributed as dist
from conformance import assert_each_rank, covers, world_sizes
from conformance.rule import MUST, Requirement

def r(name, **more):
    words = dict(level=MUST, profile="collectives", says="It holds.", source="a test")
    return Requirement(id=f"mine/{name}", **words, **more)

ROOT = r("root", needs=("op:all_reduce", "reduce_op:max"))

def disagrees(me):
    return me.rank

@covers(ROOT)
@world_sizes(2)
def test_root(ranks):
    assert_each_rank(ranks.run(disagrees), [0, 0])

def adds(me):
    x = torch.ones(1)
    dist.all_reduce(x)
    return x.item()

@covers(r("leaf", rests_on=("mine/root",)))
@world_sizes(2)
@pytest.mark.parametrize("op", ["sum", "min", "max"])
def test_leaf(ranks, op):
    assert_each_rank(ranks.run(adds), [2.0 if op != "max" else 3.0] * 2)
"""


@pytest.mark.usefixtures("own_ranks")
@pytest.mark.parametrize("repetitions", [0, 1])
def test_blocked_cases_tell_what_is_wrong_and_stay_blocked(
    inside: Callable[..., Inside], repetitions: int
) -> None:
    run = inside(CASES, f"--repetitions={repetitions}")
    leaf = run.result("mine/leaf")
    assert leaf.verdict is Verdict.BLOCKED
    assert leaf.reason == "rests on mine/root, which is broken"
    assert {case.verdicts["mine/leaf"] for case in leaf.cases} == {Verdict.BLOCKED}
    seen = {case.case.rpartition("-")[2].rstrip("]"): case.seen for case in leaf.cases}
    ran = {"sum": Verdict.HOLDS, "min": Verdict.HOLDS, "max": Verdict.BROKEN}
    assert seen == (ran if repetitions else dict.fromkeys(ran, Verdict.BLOCKED))
    outcomes = run.outcomes()
    assert outcomes.pop("test_root[ws2]") == "failed"
    assert set(outcomes.values()) == {"skipped"}
    assert run.results is not None
    [blame] = run.results.blames
    if repetitions:
        assert blame == ("reduce op MAX is wrong (2 of 2 cases fail; with MIN, SUM it works)")


def test_each_blocked_case_that_runs_brings_something_new() -> None:
    diagnoses = Diagnoses()
    assert diagnoses.take((("op", "gather"), ("rule", "gather/values")))
    assert not diagnoses.take((("op", "gather"), ("rule", "gather/strided")))
    assert diagnoses.take((("dtype", "int8"), ("op", "gather")))
    assert diagnoses.take((("aspect", "async"), ("op", "gather")))  # it may tell of wait()


def test_they_are_few_and_end_in_time() -> None:
    diagnoses = Diagnoses()
    taken = [diagnoses.take((("dtype", str(n)),)) for n in range(100)]
    assert taken == [True] * 40 + [False] * 60
    slow = Diagnoses(seconds=30.0)
    assert not slow.take((("op", "gather"),))


def test_what_may_tell_of_wait_runs_on_a_slow_machine_too() -> None:
    telling = (("aspect", "async"), ("op", "gather"))
    slow = Diagnoses(seconds=100.0)
    assert [slow.take(telling) for _ in range(20)] == [True] * 16 + [False] * 4
    assert slow.take((("op", "gather"), ("rule", "work/completed-is-written")))
    assert not Diagnoses(seconds=120.0).take(telling)  # each one hangs

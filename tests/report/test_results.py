"""From the verdicts of cases to those of requirements and of the whole run."""

from __future__ import annotations

import itertools

import pytest

from conformance.report.conclusion import Conclusion
from conformance.report.results import CaseResult
from conformance.target import Deviation, Target
from conformance.verdict import Verdict
from tests.report.samples import GOOD, case, results


def test_the_worst_case_decides_whatever_the_order() -> None:
    cases = [
        case("test_1", "c/two"),
        case("test_2", "c/two", Verdict.BROKEN, reason="wrong"),
        case("test_3", "c/two", Verdict.NOT_EXERCISED, reason="no GPU"),
    ]
    for order in itertools.permutations(cases):
        [found] = [r for r in results(*order).requirements if r.requirement.id == "c/two"]
        assert (found.verdict, found.reason, found.seconds) == (Verdict.BROKEN, "wrong", 1.5)


def test_what_no_case_says_anything_of_is_not_exercised() -> None:
    found = {r.requirement.id: r for r in results(case("test_root", "a/root")).requirements}
    assert found["c/one"].verdict is Verdict.NOT_EXERCISED
    assert found["c/one"].reason == "no case of it was selected"


def test_a_failure_above_a_broken_root_is_blocked() -> None:
    run = results(
        case("test_root", "a/root", Verdict.CRASHED),
        case("test_leaf", "a/leaf", Verdict.BROKEN, reason="wrong"),
    )
    [leaf] = [r for r in run.requirements if r.requirement.id == "a/leaf"]
    assert leaf.verdict is Verdict.BLOCKED
    assert leaf.root == "a/root"
    assert leaf.reason == "rests on a/root, which is crashed"


def test_a_success_above_a_broken_root_stays_one() -> None:
    run = results(case("test_root", "a/root", Verdict.BROKEN), case("test_leaf", "a/leaf"))
    [leaf] = [r for r in run.requirements if r.requirement.id == "a/leaf"]
    assert leaf.verdict is Verdict.HOLDS


@pytest.mark.parametrize(
    ("verdict", "conclusion"),
    [
        (Verdict.HOLDS, Conclusion.CONFORMANT),
        (Verdict.DEVIATION, Conclusion.CONFORMANT),
        (Verdict.NOT_CLAIMED, Conclusion.CONFORMANT),
        (Verdict.NOT_EXERCISED, Conclusion.CONFORMANT),
        (Verdict.BROKEN, Conclusion.NOT_CONFORMANT),
        (Verdict.TIMEOUT, Conclusion.NOT_CONFORMANT),
        (Verdict.CRASHED, Conclusion.NOT_CONFORMANT),
        (Verdict.BLOCKED, Conclusion.NOT_CONFORMANT),
        (Verdict.UNKNOWN, Conclusion.UNKNOWN),
    ],
)
def test_one_verdict_decides_the_conclusion(verdict: Verdict, conclusion: Conclusion) -> None:
    assert results(*GOOD, case("test_more", "c/two", verdict)).conclusion is conclusion


def test_a_harness_fault_and_an_interruption_decide_the_conclusion() -> None:
    assert results(*GOOD, harness_faults=["a worker died"]).conclusion is Conclusion.UNKNOWN
    assert results(*GOOD, interrupted=True).conclusion is Conclusion.INTERRUPTED
    broken = case("test_more", "c/two", Verdict.BROKEN)
    assert results(broken, interrupted=True).conclusion is Conclusion.INTERRUPTED
    assert results(harness_faults=["x"], interrupted=True).conclusion is Conclusion.UNKNOWN


def test_what_was_never_exercised_is_not_conformant() -> None:
    skipped = case("test_root", "a/root", Verdict.NOT_EXERCISED, reason="no GPU")
    run = results(skipped, planned={skipped.case: ["a/root"]})
    assert (run.conclusion, run.why_nothing) == (Conclusion.NOTHING_EXERCISED, "no GPU")
    assert run.cases_left_out == ()
    refused = case("test_sparse", "b/sparse", Verdict.NOT_CLAIMED, lacks=("feature:sparse",))
    assert results(skipped, refused).conclusion is Conclusion.NO_CONCLUSION


def test_what_works_although_it_is_not_claimed() -> None:
    lacks = {"lacks": ("feature:sparse",)}
    works = case("test_1", "b/sparse", Verdict.NOT_CLAIMED, worked=True, **lacks)
    fails = case("test_2", "b/sparse", Verdict.NOT_CLAIMED, worked=False, **lacks)
    assert results(works).under_claims == ["feature:sparse"]
    assert results(works, fails).under_claims == []
    assert results(fails).under_claims == []


def test_a_probe_that_did_not_use_what_it_lacks_tells_nothing_of_it() -> None:
    lacks = {"lacks": ("op:all_reduce", "reduce_op:sum")}
    refused = case("test_1", "a/root", Verdict.NOT_CLAIMED, worked=False, **lacks)
    another = case("test_2", "b/sparse", Verdict.NOT_CLAIMED, worked=True, **lacks)
    assert results(refused, another).under_claims == []
    assert results(another).under_claims == ["op:all_reduce", "reduce_op:sum"]
    moved = case("test_3", "c/one", Verdict.NOT_CLAIMED, worked=True, lacks=("dtype:uint16",))
    assert results(refused, another, moved).under_claims == ["dtype:uint16"]


def test_what_became_of_each_declared_deviation() -> None:
    first, second = results(*GOOD).deviations
    assert (first.matched, first.needless, first.otherwise, first.idle) == (("c/one",), (), (), ())
    assert (second.matched, second.needless) == ((), ("c/two",))
    assert second.idle == ("d/*",)
    worse = results(case("test_one", "c/one", Verdict.TIMEOUT))
    assert worse.deviations[0].otherwise == ("c/one",)
    assert results().deviations[0].otherwise == ()


def test_a_deviation_is_needless_only_if_every_case_has_run() -> None:
    run = results(*GOOD, planned={"x.py::test_more": ["c/two"]})
    assert run.deviations[1].needless == ()


def test_each_way_in_which_a_requirement_breaks_may_have_its_own_deviation() -> None:
    ways = (
        Deviation(("c/one",), "dies", expects=Verdict.CRASHED),
        Deviation(("c/*",), "hangs", expects=Verdict.TIMEOUT),
        Deviation(("c/one",), "hangs too", expects=Verdict.TIMEOUT),
    )
    hung = case("test_one", "c/one", Verdict.DEVIATION, seen=Verdict.TIMEOUT)
    run = results(hung, case("test_two", "c/two"), target=Target("x", "x", deviations=ways))
    assert [d.matched for d in run.deviations] == [(), ("c/one",), ()]
    assert [d.needless for d in run.deviations] == [(), ("c/two",), ()]
    assert [d.otherwise for d in run.deviations] == [(), (), ()]


def test_a_case_travels_as_plain_data() -> None:
    one = case("test_1", {"a/root": Verdict.HOLDS, "c/two": Verdict.BROKEN}, lacks=("op:send",))
    assert CaseResult.from_plain(one.to_plain()) == one

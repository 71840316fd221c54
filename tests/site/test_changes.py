"""What changed from one report to the next, and with each version of torch."""

from __future__ import annotations

from conformance.report.compare import Kind
from conformance.site.changes import releases, steps
from conformance.site.model import report_of
from conformance.verdict import Verdict
from tests.report.samples import case
from tests.site.samples import B, H, T, document, observatory, one


def test_a_release_tells_what_changed_for_which_targets() -> None:
    before, after = "2.12.1", "2.13.0"
    reports = [
        *(one(H, "a", before), one(B, "a", after)),
        *(one(H, "b", before), one(B, "b", after)),
        *(one(B, "c", before), one(H, "c", after)),
        *(one(H, "d", before), one(H, "d", after)),
        one(B, "only-new", after),
    ]
    [release] = releases(observatory(*reports))
    assert (release.before, release.after, release.targets) == (before, after, ("a", "b", "c", "d"))
    told = [(rule.id, rule.change.kind, rule.targets) for rule in release.rules]
    assert told == [
        ("c/two", Kind.REGRESSION, ("a", "b")),
        ("c/two", Kind.IMPROVEMENT, ("c",)),
    ]


def test_what_went_back_and_forth_comes_last_and_is_marked() -> None:
    once = [one(H, "a", "2.12.1"), one(B, "a", "2.13.0"), one(B, "a", "2.14.1")]
    twice = [one(H, "b", "2.12.1"), one(B, "b", "2.13.0"), one(H, "b", "2.14.1")]
    made = releases(observatory(*once, *twice))
    assert [(r.targets, r.is_unsteady) for r in made[0].rules] == [(("a", "b"), False)]
    assert [(r.targets, r.is_unsteady, r.was) for r in made[1].rules] == [
        (("b",), True, "because broken")
    ]


def test_a_release_tells_which_targets_it_saw_in_part() -> None:
    before, after = one(H, "a", "2.12.1", left_out=3), one(H, "a", "2.13.0")
    [release] = releases(observatory(before, after))
    assert release.selections == {"a"}


def test_what_is_blocked_comes_after_what_it_rests_on() -> None:
    before = document("a", "2.12.1", case("test_root", "a/root"), case("test_leaf", "a/leaf"))
    bad = (case("test_root", "a/root", B), case("test_leaf", "a/leaf", B))
    [release] = releases(observatory(report_of(before), report_of(document("a", "2.13.0", *bad))))
    assert [(r.id, r.change.after) for r in release.rules] == [
        ("a/root", "broken"),
        ("a/leaf", "blocked"),
    ]


def test_steps_follow_versions_and_then_dates() -> None:
    seen = observatory(
        one(T, torch="2.12.1", day=2), one(H, torch="2.12.1"), one(B, torch="2.11.0", day=9)
    )
    made = [
        (s.before.torch, s.after.torch, [c.kind for c in s.changes]) for s in steps(seen.reports)
    ]
    assert made == [
        ("2.11.0", "2.12.1", [Kind.IMPROVEMENT]),
        ("2.12.1", "2.12.1", [Kind.REGRESSION]),
    ]


def test_what_was_looked_at_in_one_of_two_is_a_number() -> None:
    [step] = steps([one(Verdict.NOT_EXERCISED), one(H, day=2)])
    assert (step.changes, step.exercised) == ((), 1)

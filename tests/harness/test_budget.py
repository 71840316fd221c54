"""`--budget`, `--cases-per-rule`: which cases come first, and what is said of those left out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from conformance.run.budget import most_rules_first
from conformance.run.settings import seconds_of
from tests.harness.kit import Outside

pytest_plugins = ["pytester"]

CASES = """
import pytest

from conformance import covers
from conformance.rule import MUST, Requirement


def r(name):
    return Requirement(id=f"mine/{name}", level=MUST, profile="faults", says="Yes.", source="me")


@covers(r("one"))
@pytest.mark.parametrize("number", range(3))
def test_one(number):
    pass

@covers(r("two"))
def test_two():
    pass
"""


def item(name: str, *, world_size: int = 2, chapter: str = "ddp/x.py", drawn: bool = False) -> Any:
    return SimpleNamespace(
        nodeid=name,
        path=Path(chapter),
        obj=SimpleNamespace(is_hypothesis_test=drawn),
        callspec=SimpleNamespace(params={"world_size": world_size}),
    )


def ordered(cases: Mapping[str, tuple[Any, tuple[str, ...]]], most: int | None = None) -> list[str]:
    items = [item for item, _ in cases.values()]
    plans = {item.nodeid: SimpleNamespace(covers=covers) for item, covers in cases.values()}
    return [item.nodeid for item in most_rules_first(items, cast(Any, plans), most)]


def named(**cases: tuple[Any, tuple[str, ...]]) -> dict[str, tuple[Any, tuple[str, ...]]]:
    return cases


def test_every_rule_gets_a_case_before_any_gets_a_second_one() -> None:
    cases = [(item(f"{rule}{n}"), (rule,)) for rule in "abc" for n in range(3)]
    found = ordered({case.nodeid: (case, covers) for case, covers in cases})
    assert found == ["a0", "b0", "c0", "a1", "b1", "c1", "a2", "b2", "c2"]


def test_a_case_of_two_ranks_stands_for_its_rule() -> None:
    cases = {f"ws{size}": (item(f"ws{size}", world_size=size), ("a",)) for size in (1, 3, 2, 4)}
    assert ordered(cases) == ["ws2", "ws3", "ws4", "ws1"]


def test_the_second_case_of_a_rule_has_another_size_and_other_parameters() -> None:
    sizes_and_kinds = [(size, kind) for size in (2, 3) for kind in "xy"]
    cases = {f"{k}{n}": (item(f"{k}{n}", world_size=n), ("a",)) for n, k in sizes_and_kinds}
    assert ordered(cases) == ["x2", "y3", "y2", "x3"]


def test_cases_that_take_long_come_last_in_their_round() -> None:
    cases = named(
        waits=(item("waits", chapter="faults/timeouts.py"), ("a",)),
        drawn=(item("drawn", drawn=True), ("b",)),
        short=(item("short"), ("c",)),
        again=(item("again", world_size=3), ("c",)),
    )
    assert ordered(cases) == ["short", "waits", "drawn", "again"]


def test_a_case_of_two_rules_counts_for_both() -> None:
    cases = named(
        both=(item("both"), ("a", "b")),
        more=(item("more"), ("b",)),
        other=(item("other"), ("c",)),
    )
    assert ordered(cases) == ["both", "other", "more"]


def test_there_are_as_many_rounds_as_are_asked_for() -> None:
    cases = named(
        **{f"{rule}{n}": (item(f"{rule}{n}"), (rule,)) for rule in "ab" for n in range(3)},
        both=(item("both"), ("a", "c")),
    )
    assert ordered(cases, most=1) == ["a0", "b0", "both"]
    assert ordered(cases, most=2) == ["a0", "b0", "both", "a1", "b1"]


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("60s", 60), ("1.5m", 90), ("2h", 7200), ("0.5s", 0.5)]
)
def test_times_have_units(text: str, seconds: float) -> None:
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["", "s", "0s", "-1", "1 m", "1d", "1e3", "nan"])
def test_other_texts_are_no_times(text: str) -> None:
    with pytest.raises(ValueError, match="is no time such as 60s or 5m"):
        seconds_of(text)


def test_what_there_was_no_time_for_is_left_out_and_said(outside: Outside) -> None:
    outside.pytester.makepyfile(test_case=CASES)
    run = outside.run("-n0", "--budget", "0.0001s")
    assert run.certificate is not None
    assert run.row("mine/one")["verdict"] == "holds"
    assert run.row("mine/two")["reason"] == "its cases were left out"
    assert run.certificate["run"]["cases_left_out"] == 3
    assert "no conclusion" in run.out


def test_a_budget_that_is_not_used_up_changes_no_verdict(outside: Outside) -> None:
    outside.pytester.makepyfile(test_case=CASES)
    run = outside.run("-n2", "--budget", "1h")
    assert run.certificate is not None
    assert [run.row(f"mine/{name}")["verdict"] for name in ("one", "two")] == ["holds"] * 2
    assert run.certificate["run"]["cases_left_out"] == 0


def test_cases_beyond_a_number_for_each_rule_are_left_out_and_said(outside: Outside) -> None:
    outside.pytester.makepyfile(test_case=CASES)
    run = outside.run("-n0", "--cases-per-rule", "1")
    assert run.certificate is not None
    assert [run.row(f"mine/{name}")["verdict"] for name in ("one", "two")] == ["holds"] * 2
    assert run.certificate["run"]["cases_left_out"] == 2
    assert "no conclusion" in run.out


def test_no_cases_for_each_rule_are_refused(outside: Outside) -> None:
    run = outside.run("--cases-per-rule", "0")
    assert run.exit_status == 2
    assert "--cases-per-rule 0: must be 1 or more" in run.err


def test_a_budget_that_is_no_time_is_refused(outside: Outside) -> None:
    run = outside.run("--budget", "soon")
    assert run.exit_status == 2
    assert "--budget: 'soon' is no time such as 60s or 5m" in run.err

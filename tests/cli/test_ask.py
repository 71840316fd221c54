"""`ask`: what is noted of a case, what goes into one row, and two targets asked in earnest."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, cast

import pytest

from conformance.__main__ import main
from conformance.cli.ask import Answer, answers_of, rows_of
from conformance.harness.outcome import Died, Outcome, Raised, Returned
from conformance.harness.ranks import Ranks
from conformance.session.answers import answer

RULE = "reductions/average-of-integers"
REFUSED = Raised("ValueError", "no", "a traceback", ("ValueError",))


def world(*outcomes: Outcome) -> Ranks:
    return cast(Ranks, SimpleNamespace(last_run=SimpleNamespace(outcomes=outcomes)))


@pytest.mark.parametrize(
    ("outcomes", "says"),
    [
        ([Returned(3)], "the rank returned 3"),
        ([Returned([1, 2])] * 3, "all ranks returned [1, 2]"),
        ([Returned(3), REFUSED, REFUSED], "rank 0 returned 3\nranks 1 and 2 raised ValueError: no"),
        ([Returned("a\n  b"), Died(-9)], "rank 0 returned 'a\\n b'\nrank 1 died: SIGKILL"),
    ],
)
def test_ranks_of_which_the_same_became_share_a_line(outcomes: list[Outcome], says: str) -> None:
    assert answer(world(*outcomes), "") == says


def test_long_values_are_cut() -> None:
    said = answer(world(Returned(list(range(1000)))), "")
    assert said.endswith(" ... (4890 characters)") and len(said) < 400


def test_without_a_run_the_reason_is_the_answer() -> None:
    assert answer(None, "blocked: it rests on a/b") == "blocked: it rests on a/b"


def rules(verdict: str) -> dict[str, Any]:
    return {"rules": {"a/b": "holds", RULE: verdict}}


def line(case: str, verdict: str, said: str, rule: str = RULE) -> dict[str, Any]:
    return {"case": case, "verdicts": {rule: verdict}, "answer": said}


def test_answers_of_other_rules_are_left_out() -> None:
    lines = [line("test_a", "holds", "3"), line("test_b", "holds", "4", rule="a/b")]
    found = answers_of(RULE, {"mine": [*lines, rules("holds")]})
    assert found.verdicts == {"mine": "holds"}
    assert found.answers == (Answer("test_a", "mine", "holds", "3"),)


def test_the_last_answer_of_a_case_counts() -> None:
    lines = [line("test_a", "broken", "3"), line("test_a", "broken", "4")]
    found = answers_of(RULE, {"mine": [*lines, rules("broken")]})
    assert [answer.answer for answer in found.answers] == ["4"]


def test_a_run_that_broke_off_says_nothing_of_the_rule() -> None:
    assert answers_of(RULE, {"mine": []}).verdicts == {"mine": "unknown"}


def test_cases_with_the_same_answers_of_all_targets_are_one_row() -> None:
    answers = [
        Answer("test_x[1]", "a", "holds", "3"),
        Answer("test_x[2]", "a", "holds", "3"),
        Answer("test_x[3]", "a", "holds", "4"),
        Answer("test_x[1]", "b", "holds", "3"),
        Answer("test_x[2]", "b", "holds", "3"),
    ]
    rows = [
        (cases, [cell and cell.answer for cell in cells])
        for cases, cells in rows_of(answers, ["a", "b"])
    ]
    assert rows == [(["test_x[1]", "test_x[2]"], ["3", "3"]), (["test_x[3]"], ["4", None])]


def test_two_targets_are_asked(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ask", RULE, "--targets", "torch,impl", "--json"]) == 0
    (answers,) = json.loads(capsys.readouterr().out)
    assert answers["verdicts"] == {"torch": "deviation", "impl": "holds"}
    said = {(one["case"], one["target"]): one["answer"] for one in answers["answers"]}
    case = "test_average_of_integers[ws2-int32]"
    assert said[case, "torch"].startswith("all ranks raised RuntimeError: result type Float")
    assert "5" in said[case, "impl"]


def test_a_target_without_the_part_is_no_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ask", "ddp/average", "--targets", "tests.zoo.store_based:TARGET", "--json"]) == 0
    (answers,) = json.loads(capsys.readouterr().out)
    assert answers["verdicts"] == {"tests.zoo.store_based:TARGET": "not exercised"}
    assert answers["answers"] == []


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["no/rule"], "no/rule"),
        ([RULE, "--targets", ","], "--targets names no target"),
        ([RULE, "--targets", "nothing.toml"], "nothing.toml"),
    ],
)
def test_what_cannot_be_asked_is_said_in_one_line(
    argv: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ask", *argv]) == 2
    said = capsys.readouterr().err
    assert said.startswith("c10d-conformance ask: ") and says in said
    assert said.count("\n") == 1

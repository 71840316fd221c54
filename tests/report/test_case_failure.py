"""The record of a failed case: its cause, its ranks, and its place in the certificate."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from conformance import CheckFailed
from conformance.harness.failure import RanksFailed
from conformance.harness.outcome import Died, Raised, Returned
from conformance.report.case_failure import (
    REPEATED_TEXT_CHARS,
    TEXT_CHARS,
    Failure,
    bounded,
    cause_of,
    failure_of,
)
from conformance.report.failure import FailedCase
from conformance.report.results import CaseResult
from conformance.report.schema import load_schema, violations
from conformance.report.verify import problems
from conformance.target import Target
from conformance.verdict import Verdict
from tests.report.samples import GOOD, case, certificate

FAILURE = Failure(
    text="all of it",
    again=("python", "-m", "pytest", "tests/test_x.py::test_root[ws2]"),
    script="alone/test_root.py",
    cause="CheckFailed: rank N is wrong (many)",
    wrong_ranks=(1,),
    example="Falsifying example: numel=3",
)


def failed(error: BaseException, script: str = "none: no ranks ran") -> FailedCase:
    return FailedCase(
        target=Target(name="t", backend="gloo"),
        verdict=Verdict.BROKEN,
        verdicts={},
        world_size=2,
        parameters={},
        path=Path("test_x.py"),
        error=error,
        last_run=None,
        command=["python", "-m", "pytest"],
        script=script,
    )


def test_it_survives_the_way_from_a_worker() -> None:
    sent = case("test_root", "a/root", Verdict.BROKEN, failure=FAILURE)
    assert CaseResult.from_plain(json.loads(json.dumps(sent.to_plain()))) == sent
    good = case("test_root", "a/root")
    assert CaseResult.from_plain(json.loads(json.dumps(good.to_plain()))) == good


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (CheckFailed("rank 1 is wrong\n3 and 4"), "CheckFailed: rank N is wrong (many)"),
        (CheckFailed("rank 0 is wrong, and so is rank 1"), "CheckFailed: rank N is wrong (many)"),
        (ValueError(), "ValueError: "),
        (TypeError("at 0x7f00 of 1.5"), "TypeError: at N of N"),
        (
            RanksFailed("f", [Returned(1), Raised("TypeError", "no 17\nmore", "")]),
            "raised TypeError: no N ...",
        ),
        (
            RanksFailed("f", [Died(-11, "", "send #3 on group '0', [2 x bool (5,)]", True)]),
            "died: SIGSEGV in send",
        ),
    ],
)
def test_numbers_do_not_tell_causes_apart(error: BaseException, cause: str) -> None:
    assert cause_of(error, "many/values") == cause


def test_wrong_ranks_are_those_that_did_not_return_or_returned_a_wrong_value() -> None:
    died = RanksFailed("f", [Returned(1), Died(-9), Raised("X", "", "")])
    assert failure_of(failed(died), "", "", "alone").wrong_ranks == (1, 2)
    assert failure_of(failed(CheckFailed("wrong", 1)), "", "", "alone").wrong_ranks == (1,)
    assert failure_of(failed(CheckFailed("wrong")), "", "", "alone").wrong_ranks == ()


def test_what_was_drawn_and_the_script_are_kept() -> None:
    error = CheckFailed("wrong")
    error.add_note("Falsifying example: test(\n    numel=3,\n)")
    error.add_note("You can reproduce this example by ...")
    found = failure_of(failed(error, "/tmp/here/alone/test_x.py"), "", "text", "alone")
    assert found.example == "Falsifying example: test(\n    numel=3,\n)"
    assert found.script == "alone/test_x.py"
    assert failure_of(failed(error), "", "text", "alone").script == ""


def test_a_long_text_keeps_its_beginning_and_its_end() -> None:
    text = bounded("begin" + "x" * 2 * TEXT_CHARS + "again: pytest", TEXT_CHARS)
    assert len(text) <= TEXT_CHARS
    assert text.startswith("begin")
    assert text.endswith("again: pytest")
    assert "characters left out" in text
    assert bounded("short", TEXT_CHARS) == "short"


def test_the_certificate_has_each_failed_case_once_and_few_long_texts_of_a_cause() -> None:
    long = Failure(text="x" * TEXT_CHARS, cause="one")
    broken = {"c/one": Verdict.BROKEN, "c/two": Verdict.BROKEN}
    cases = [case(f"test_{n}", broken, Verdict.BROKEN, failure=long) for n in range(5)]
    document = certificate(*cases, exit_status=1)
    assert [f["case"] for f in document["failures"]] == [c.case for c in cases]
    lengths = [len(f["text"]) for f in document["failures"]]
    assert lengths[:3] == [TEXT_CHARS] * 3
    assert max(lengths[3:]) <= REPEATED_TEXT_CHARS
    assert not list(violations(json.loads(json.dumps(document)), load_schema()))


def test_a_failure_that_no_requirement_has_is_seen() -> None:
    document = certificate(*GOOD)
    document["failures"] = [{"case": "tests/test_x.py::test_root[ws2]", **FAILURE.to_plain()}]
    says = "it tells why tests/test_x.py::test_root[ws2] failed, and no requirement has that"
    assert any(says in line for line in problems(document))

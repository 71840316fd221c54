"""The suite's score in mutation testing: kept one a kind of mutants, and told by certificates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from conformance.report import power_score, verify
from conformance.report.power_score import note, scores

SCORE = {
    "mutants": "torch's gloo with one bug",
    "profiles": "collectives",
    "drawn": 60,
    "of": 2000,
    "seed": 2,
    "run": 44,
    "killed": 40,
    "date": "2026-11-27",
}


def test_a_newer_score_takes_the_place_of_the_older_one(tmp_path: Path) -> None:
    file = tmp_path / "power.json"
    file.write_text("[]")
    other = {**SCORE, "mutants": "impl.ddp with one change"}
    for score in (SCORE, other, {**SCORE, "killed": 44}):
        note(score, file)
    assert scores(file) == [other, {**SCORE, "killed": 44}]


@pytest.mark.parametrize(
    ("changed", "problems"),
    [
        ({}, []),
        ({"date": "2026-11-20", "killed": 12}, []),  # of another day nothing is known
        ({"killed": 44}, ["its score of torch's gloo with one bug is not that of this suite"]),
        (
            {"date": "2026-11-20", "run": 61},
            ["its numbers of torch's gloo with one bug cannot be"],
        ),
    ],
)
def test_a_score_that_was_edited_is_noticed(
    monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any], problems: list[str]
) -> None:
    monkeypatch.setattr(verify, "scores", lambda: [SCORE])
    document = {"suite": {"power": [{**SCORE, **changed}]}}
    assert list(verify._power(document)) == problems


def test_the_suites_own_scores_can_be() -> None:
    document = {"suite": {"power": power_score.scores()}}
    assert list(verify._power(document)) == []

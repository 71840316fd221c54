"""The conclusion of a run: which profiles it calls conformant, and when."""

from __future__ import annotations

from dataclasses import replace

import pytest

from conformance.report.conclusion import (
    Circumstances,
    Conclusion,
    Row,
    conclude,
    conclusions_of_profiles,
    sentence,
)
from conformance.verdict import Verdict

HELD = Row("p2p", Verdict.HOLDS, exercised=True, cases=2, left_out=0)
CLAIMED_BY_NOBODY = Row("p2p", Verdict.NOT_CLAIMED, exercised=False, cases=0, left_out=0)
SKIPPED = Row("p2p", Verdict.NOT_EXERCISED, exercised=False, cases=1, left_out=0)
MISSED = Row("p2p", Verdict.NOT_EXERCISED, exercised=False, cases=0, left_out=0)
ELSEWHERE = replace(MISSED, profile="ddp")
BROKEN = replace(HELD, verdict=Verdict.BROKEN)
PLAIN = Circumstances()


@pytest.mark.parametrize(
    ("rows", "circumstances", "conclusion"),
    [
        ([HELD, HELD], PLAIN, Conclusion.CONFORMANT),
        ([HELD, CLAIMED_BY_NOBODY, SKIPPED, ELSEWHERE], PLAIN, Conclusion.CONFORMANT),
        ([HELD, MISSED], PLAIN, Conclusion.NO_CONCLUSION),
        ([HELD, replace(HELD, left_out=1)], PLAIN, Conclusion.NO_CONCLUSION),
        ([HELD], Circumstances(restricted=True), Conclusion.NO_CONCLUSION),
        ([HELD], Circumstances(files_left_out=True), Conclusion.NO_CONCLUSION),
        ([HELD, BROKEN, MISSED], PLAIN, Conclusion.NOT_CONFORMANT),
        ([HELD], Circumstances(interrupted=True), Conclusion.INTERRUPTED),
        ([HELD], Circumstances(harness_failed=True), Conclusion.UNKNOWN),
        ([CLAIMED_BY_NOBODY, SKIPPED], PLAIN, Conclusion.NOTHING_EXERCISED),
    ],
)
def test_a_profile_is_conformant_only_as_a_whole(
    rows: list[Row], circumstances: Circumstances, conclusion: Conclusion
) -> None:
    assert conclusions_of_profiles(rows, circumstances)["p2p"] is conclusion
    assert conclude(rows, circumstances) is conclusion
    names_it = "conformant: p2p" in sentence(rows, circumstances)
    assert names_it is (conclusion in (Conclusion.CONFORMANT, Conclusion.NOT_CONFORMANT))


def test_a_broken_profile_does_not_hide_one_that_is_whole() -> None:
    rows = [BROKEN, replace(HELD, profile="groups")]
    assert sentence(rows, PLAIN) == (
        "not conformant: p2p; 1 of 2 requirements do not hold; conformant: groups"
    )


def test_what_failed_once_is_said_where_it_is_called_conformant() -> None:
    assert sentence([HELD], Circumstances(failed_once=2)) == (
        "conformant: p2p; 1 of 1 requirements hold; 2 cases failed once, and not again"
    )


def test_a_selection_says_how_much_it_is_and_concludes_nothing() -> None:
    rows = [HELD, *[MISSED] * 1150]
    assert sentence(rows, PLAIN) == (
        "selection of 1 of 1,151 requirements: no conclusion; 1 of 1 requirements hold "
        "(1150 more not exercised)"
    )


def test_a_whole_profile_beside_a_selection_of_another_is_named() -> None:
    rows = [HELD, replace(HELD, profile="groups"), replace(MISSED, profile="groups")]
    assert conclude(rows, PLAIN) is Conclusion.NO_CONCLUSION
    assert sentence(rows, PLAIN).endswith("; whole and conformant: p2p")

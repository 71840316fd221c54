"""The summary of a run on a terminal."""

from __future__ import annotations

import pytest

from conformance.report.results import Results
from conformance.report.terminal import duration, summary_lines, verdict_line
from conformance.verdict import Verdict
from tests.report.samples import GOOD, case, results


def summary(run: Results, width: int = 80) -> str:
    return "\n".join(summary_lines(run, 75.2, width))


def test_a_good_run() -> None:
    assert summary(results(*GOOD)) == (
        """\
profile  holds  not claimed  deviation  cases   time
p2p          1                       1      2  1.0 s
sparse                    1                 1  0.5 s
groups       2                              2  1.0 s
all          3            1          1      5  2.5 s

deviation: known since long (https://example.org/1)
    c/one

declared as a deviation, and holds after all:
    c/two

declared as a deviation, and matches no requirement:
    d/*

works, although not claimed:
    feature:sparse

not claimed: 1 requirement
    b/sparse

5 cases in 1 min 15 s"""
    )
    assert verdict_line(results(*GOOD)) == (
        "sample: conformant: p2p, groups; 3 of 5 requirements hold (1 deviation, 1 not claimed)"
    )


def test_a_bad_run() -> None:
    wrong = [
        case(f"test_{n}", "a/root", Verdict.CRASHED, reason="rank 1 died: SIGSEGV")
        for n in range(5)
    ]
    leaf = case("test_leaf", "a/leaf", Verdict.BLOCKED)
    text = summary(results(*wrong, leaf, harness_faults=["a worker died"]))
    assert "crashed: a/root (MUST)\n    a/root holds.\n    tests/test_x.py::test_0[ws2]\n" in text
    assert "        rank 1 died: SIGSEGV\n" in text
    assert "    and 2 more cases\n" in text
    assert "blocked, rests on a/root, which is crashed:\n    a/leaf\n" in text
    assert "not exercised, no case of it was selected: 3 requirements\n    b/sparse, c/" in text
    assert "harness fault: a worker died\n" in text
    assert verdict_line(results(*wrong, leaf)) == (
        "sample: not conformant: groups; 1 of 2 requirements do not hold; a selection"
    )


def test_a_long_reason_is_cut() -> None:
    reason = "values " + "0.125, " * 500
    text = summary(results(case("test_root", "a/root", Verdict.BROKEN, reason=reason)))
    assert f"({len(reason)} characters)\n" in text
    assert text.count("0.125") < 50
    assert text.endswith("\n1 case in 1 min 15 s")


def test_what_was_left_out_is_told() -> None:
    left_out = {"x.py::test_1": ["a/root"], "x.py::test_2": ["a/root", "d/none"]}
    run = results(*GOOD, planned=left_out, files_left_out=["y.py"])
    assert verdict_line(run).endswith("claimed); 2 cases and 1 file were left out")
    text = "judged without some of its cases, which were left out: 1 requirement\n    a/root\n"
    assert text in summary(run)
    one = results(*GOOD, planned={"x.py::test_1": ["a/root"]})
    assert verdict_line(one).endswith("; 1 case was left out")


def test_the_verdict_says_when_a_run_proves_nothing() -> None:
    assert "the harness failed" in verdict_line(results(*GOOD, harness_faults=["x"]))
    assert "interrupted" in verdict_line(results(*GOOD, interrupted=True))


@pytest.mark.parametrize("width", [72, 80, 100])
def test_lines_fit_but_for_what_is_to_be_copied(width: int) -> None:
    every = [
        case(f"test_{n}", id, verdict, reason="a long story " * 20)
        for n, (id, verdict) in enumerate(
            zip(
                ("a/root", "a/leaf", "b/sparse", "c/one", "c/two"),
                (Verdict.UNKNOWN, Verdict.TIMEOUT, Verdict.NOT_CLAIMED, Verdict.DEVIATION),
                strict=False,
            )
        )
    ]
    lines = summary(results(*every), width).splitlines()
    assert max(map(len, lines)) <= width
    if width == 72:
        assert lines[0].split() == ["not", "not"], "headings of two words go over two lines"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0 s"), (9.94, "9.9 s"), (52.4, "52 s"), (185, "3 min 05 s"), (59.7, "1 min 00 s")],
)
def test_durations_are_as_exact_as_it_matters(seconds: float, text: str) -> None:
    assert duration(seconds) == text

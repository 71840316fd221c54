"""Unusual ranks and values are reported correctly, and do not affect the run or the next case."""

from __future__ import annotations

from pathlib import Path

from conformance.verdict import Verdict
from tests.harness.kit import Outside

pytest_plugins = ["pytester"]

CASES = Path(__file__).with_name("odd_cases.py")

# What a case does -> the test that does it, the verdict, and what the report says.
EXPECTED = {
    "raises_without_text": (
        "odd",
        Verdict.BROKEN,
        "test_odd_cases.NoText: <exception str() failed>",
    ),
    "raises_without_a_name": ("odd", Verdict.BROKEN, "that has no name: what it says"),
    "returns_what_cannot_be_packed": ("odd", Verdict.UNKNOWN, "returned value is of no use: 3"),
    "returns_what_cannot_be_unpacked": ("odd", Verdict.BROKEN, "object at"),
    "returns_what_skips": ("odd", Verdict.BROKEN, "object at"),
    "hangs_with_a_child_elsewhere": ("odd", Verdict.TIMEOUT, "in hangs_with_a_child_elsewhere"),
    "its_child_returns": ("odd", Verdict.HOLDS, ""),
    "its_child_raises": ("odd", Verdict.HOLDS, ""),
    "starts_a_process": ("odd", Verdict.HOLDS, ""),
    "its_child_exits": ("odd", Verdict.HOLDS, ""),
    "returns_what_cannot_be_shown": ("shown", Verdict.BROKEN, "NotShown object at"),
    "returns_a_nested_tensor": ("shown", Verdict.BROKEN, "returned float32 (2, nested)"),
    "sets_an_alarm": ("changing", Verdict.HOLDS, ""),
    "sets_a_device": ("changing", Verdict.HOLDS, ""),
    "closes_its_output": ("changing", Verdict.HOLDS, ""),
    "replaces_a_function": ("changing", Verdict.HOLDS, ""),
}


def test_odd_ranks_and_values_are_judged_as_what_they_are(outside: Outside) -> None:
    outside.pytester.makepyfile(test_odd_cases=CASES.read_text())
    run = outside.run_in_new_interpreter("-n", "0")
    assert outside.left_over() == []
    assert "INTERNALERROR" not in run.out
    for name, (test, verdict, says) in EXPECTED.items():
        text = run.report(f"test_{test}[ws2-{name}]")
        assert run.verdict(f"odd/{name.replace('_', '-')}") == verdict, name + text
        assert says in text, f"{name}: {says!r} is not in\n{text}"
    assert run.verdict("odd/check") == Verdict.UNKNOWN
    assert run.verdict("groups/leaves-nothing-behind") == "not exercised"

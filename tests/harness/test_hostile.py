"""Ranks that attack the harness are judged as any other, and neither hang nor end the run."""

from __future__ import annotations

import re
from pathlib import Path

from conformance.verdict import Verdict
from tests.harness.kit import Outside

pytest_plugins = ["pytester"]

CASES = Path(__file__).with_name("hostile_cases.py")

# What a rank does -> the verdict, and what the report says.
EXPECTED = {
    "returns_what_exits": (Verdict.BROKEN, "Exits object"),
    "returns_what_interrupts": (Verdict.BROKEN, "Interrupts object"),
    "raises_an_interrupt": (Verdict.BROKEN, "raised KeyboardInterrupt"),
    "raises_what_exits": (Verdict.CRASHED, "exit code 0"),
    "raises_what_leaves": (Verdict.BROKEN, "<exception str() failed>"),
    "raises_what_interrupts": (Verdict.CRASHED, "exit code 1"),
    "raises_a_chain": (Verdict.BROKEN, "number 2999"),
    "raises_a_long_text": (Verdict.BROKEN, "characters left out"),
    "returns_what_hangs_when_shown": (Verdict.TIMEOUT, ""),
    "returns_what_is_shown_by_itself": (Verdict.BROKEN, "ShownByItself object"),
    "returns_a_circle": (Verdict.BROKEN, "[...]"),
    "returns_ten_gigabytes": (Verdict.BROKEN, "(2500000000,)"),
    "writes_what_looks_like_a_length": (Verdict.UNKNOWN, "where only the harness writes"),
    "writes_stray_bytes": (Verdict.UNKNOWN, "where only the harness writes"),
    "closes_its_descriptors": (Verdict.CRASHED, ""),
    "shortens_what_it_shares": (Verdict.BROKEN, "after that"),
    "fills_what_it_shares": (Verdict.TIMEOUT, ""),
    "stops_the_fork_server": (Verdict.BROKEN, "after that"),
    "leaves_a_daemon": (Verdict.HOLDS, ""),
    "leaves_a_daemon_and_dies": (Verdict.CRASHED, ""),
    "leaves_what_ends": (Verdict.HOLDS, ""),
}


def test_hostile_ranks_are_judged_and_the_next_case_passes(outside: Outside) -> None:
    outside.pytester.makepyfile(test_hostile_cases=CASES.read_text())
    run = outside.run_in_new_interpreter("-n", "0", "--repetitions", "0")
    assert outside.left_over() == []
    assert "INTERNALERROR" not in run.out
    for name, (verdict, says) in EXPECTED.items():
        text = run.report(f"test_hostile[ws2-{name}]")
        assert run.verdict(f"hostile/{name.replace('_', '-')}") == verdict, name + text
        assert says in text, f"{name}: {says!r} is not in\n{text}"
        after = f"hostile/behaves-after-{name.replace('_', '-')}"
        assert run.verdict(after) == Verdict.HOLDS, f"after {name}"
    assert run.verdict("hostile/stopped-before-large-arguments") == Verdict.TIMEOUT
    assert re.search(r"process \d+: a fork of this one", run.out), "the daemon is not reported"

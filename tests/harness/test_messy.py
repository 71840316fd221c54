"""Ranks that misbehave in every way: the verdict, the message, and the case after them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from conformance.report.folder import newest_in
from conformance.report.verify import junit_problems, problems
from conformance.verdict import Verdict
from tests.harness.kit import Outside

pytest_plugins = ["pytester"]

CASES = Path(__file__).with_name("messy_cases.py")
HYGIENE = "groups/leaves-nothing-behind"

# What a rank does -> the verdict, and what the report says.
EXPECTED = {
    "raises": (Verdict.BROKEN, "rank 1  raised ValueError: bad luck"),
    "exits_with_0": (Verdict.CRASHED, "rank 1  died: exit code 0"),
    "exits_with_3": (Verdict.CRASHED, "rank 0  died: exit code 3"),
    "leaves_by_sys_exit": (Verdict.BROKEN, "rank 0  raised SystemExit: enough"),
    "segfaults": (Verdict.CRASHED, "in segfaults"),  # its stack
    "is_killed": (Verdict.CRASHED, "rank 1  died: SIGKILL"),
    "sleeps_in_python": (Verdict.TIMEOUT, "in sleeps_in_python"),
    "blocks_in_c": (Verdict.TIMEOUT, "in blocks_in_c"),
    "blocks_in_c_with_the_gil": (Verdict.TIMEOUT, "in blocks_in_c_with_the_gil"),
    "is_stopped": (Verdict.TIMEOUT, "(no answer to the request for stacks)"),
    "one_does_not_join_in": (
        Verdict.TIMEOUT,
        "rank 0 waited in all_reduce #1 on group 'default', float32 (5,); rank 1 had returned.",
    ),
    "disagrees": (Verdict.BROKEN, "first at [0]: got 2.0, want 1.0"),
    "prints_a_lot": (Verdict.BROKEN, "the last line"),
    "reads_stdin": (Verdict.HOLDS, ""),
    "writes_to_stdin": (Verdict.BROKEN, "raised OSError: [Errno 9] Bad file descriptor"),
    "returns_a_lock": (Verdict.BROKEN, "unlocked _thread.lock object"),
    "keeps_a_group": (Verdict.HOLDS, "rank 1 left behind: group '1'"),
    "keeps_a_thread": (Verdict.HOLDS, "rank 0 left behind: thread 'poller'"),
    "keeps_a_descriptor": (Verdict.HOLDS, "rank 0 left behind: 1 descriptor of /dev/zero"),
    "keeps_shared_memory": (Verdict.HOLDS, "rank 1 left behind: shared memory /dev/shm/psm_"),
    "starts_a_process": (Verdict.HOLDS, "rank 0 left behind: process "),
    "kills_the_fork_server": (Verdict.CRASHED, "died: exit code 255"),
}


@pytest.mark.parametrize("workers", [0, 2])
def test_each_rank_is_judged_and_the_next_case_passes(outside: Outside, workers: int) -> None:
    outside.pytester.makepyfile(test_messy=CASES.read_text())
    # Alone, the quick ones: the others take a deadline each, and are the same with workers.
    names = list(EXPECTED) if workers else ["raises", "exits_with_0", "keeps_a_thread"]
    chosen = [] if workers else ["-k", " or ".join(names)]
    run = outside.run_in_new_interpreter("-n", str(workers), "--repetitions", "1", *chosen)
    assert outside.left_over() == []
    for name in names:
        verdict, says = EXPECTED[name]
        text = run.report(f"test_messy[ws2-{name}]")
        assert run.verdict(id_of(name)) == verdict, name
        assert says in text, f"{name}: {says!r} is not in\n{text}"
        assert run.verdict(id_of(f"behaves_after_{name}")) == Verdict.HOLDS, name
    assert run.verdict(HYGIENE) == Verdict.BROKEN
    if workers:
        faults, ended = ["a pytest worker crashed in test_messy.py::test_worker_dies[ws2]"], 3
    else:
        faults, ended = [], 1
    assert run.certificate is not None
    assert run.certificate["harness_faults"] == faults
    assert run.exit_status == ended
    assert run.certificate["conclusion"] == ("unknown" if workers else "not conformant")
    if not workers:
        assert f"rule {HYGIENE} does not hold (1 of 1 case fails)" in run.certificate["blames"]
    _check_whole(run.certificate, newest_in(outside.pytester.path / "certificate"))


def id_of(name: str) -> str:
    return f"messy/{name.replace('_', '-')}"


def _check_whole(certificate: dict[str, Any], folder: Path) -> None:
    """The certificate of such a run is consistent, and its scripts are there."""
    assert list(problems(certificate)) == []
    assert list(junit_problems(certificate, folder / "junit.xml")) == []
    assert any("exits_with_0" in path.name for path in (folder / "alone").glob("*.py"))

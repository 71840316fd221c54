"""What a failing case prints, and the command that runs it again."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import conformance
from conformance import CheckFailed
from conformance.catalogue.rules import catalogue
from conformance.harness.failure import RanksFailed
from conformance.harness.outcome import Died, Outcome, Raised, Returned, StillRunning
from conformance.harness.pool import WorldSpec
from conformance.harness.ranks import LastRun
from conformance.report.again import Invocation, command_again
from conformance.report.failure import FailedCase, failure_text
from conformance.target import Target
from conformance.verdict import Verdict
from tests.report.samples import settings

TARGET = Target(name="sample", backend="gloo")
HERE = Path(__file__)


def sums(me: object) -> None:
    """What the ranks run."""


def last_run(outcomes: Sequence[Outcome], outputs: Sequence[str] = (), **more: Any) -> LastRun:
    spec = WorldSpec(TARGET, len(outcomes), "cpu", 0, True, 60.0, ())
    return LastRun(spec, sums, [()] * len(outcomes), outcomes, outputs, **more)


def failed(error: BaseException, run: LastRun | None, **given: Any) -> str:
    words: dict[str, Any] = {
        "target": TARGET,
        "verdict": Verdict.BROKEN,
        "verdicts": {"all_reduce/sum": Verdict.BROKEN},
        "world_size": 2,
        "parameters": {"dtype": "float32", "root": "1"},
        "path": HERE,
        "command": ["pytest", "a test"],
        "script": "alone.py",
    }
    return failure_text(FailedCase(error=error, last_run=run, **{**words, **given}))


def check_that_fails(values: list[torch.Tensor]) -> None:
    raise CheckFailed("rank 1 is wrong\n1 of 3 elements differ", 1, values, values)


def caught(values: list[torch.Tensor]) -> CheckFailed:
    with pytest.raises(CheckFailed) as error:
        check_that_fails(values)
    return error.value


def test_a_report_of_wrong_data() -> None:
    values = [torch.ones(3), torch.zeros(3)]
    error = caught(values)
    text = failed(error, last_run([Returned(value) for value in values]))
    head, at, tail = text.partition("checked at ")
    says = catalogue()["all_reduce/sum"].says
    assert head == (
        f"all_reduce/sum  broken\n"
        f"  MUST: {says}\n"
        f"  source: {catalogue()['all_reduce/sum'].source}\n"
        "\n"
        "target      sample (backend gloo)\n"
        "world size  2\n"
        "parameters  dtype=float32, root=1\n"
        "\n"
        "sums:\n"
        "  rank 0  returned float32 (3,)\n"
        "  rank 1  returned float32 (3,)   <- differs\n"
        "\n"
        "rank 1 is wrong\n"
        "1 of 3 elements differ\n"
    )
    assert at
    assert tail.startswith(f"{HERE}:")
    assert 'raise CheckFailed("rank 1 is wrong' in tail
    assert tail.endswith("\n\nagain:  pytest 'a test'\nalone:  alone.py")


def test_a_report_of_wrong_data_has_what_ranks_printed() -> None:
    values = [torch.ones(3), torch.zeros(3)]
    run = last_run([Returned(value) for value in values], ["", "a hint\n"])
    assert "\n\nrank 1 printed:\n    a hint\n" in failed(caught(values), run)


def test_control_characters_are_shown_and_not_obeyed() -> None:
    error = RanksFailed("sums", [Raised("ValueError", "\x1b[2J\x9bgone", "", ("ValueError",))])
    text = failed(error, last_run(error.outcomes))
    assert "rank 0  raised ValueError: \\x1b[2J\\x9bgone\n" in text
    assert all(c in "\n\t" or c.isprintable() for c in text)


def test_a_report_of_ranks_that_failed() -> None:
    outcomes: list[Outcome] = [
        Raised("ValueError", "no", "Traceback\n  here\nValueError: no", ("ValueError",)),
        StillRunning(
            "Current thread 0x1 (most recent call first):\n"
            '  File "case.py", line 3 in sums\n'
            '  File "/x/conformance/harness/worker.py", line 9 in _call\n'
            '  File "/x/forkserver.py", line 1 in main\n'
            "\n"
            "Thread 0x2 (most recent call first):\n"
            '  File "other.py", line 1 in run',
            "barrier #1 on group 'default'",
            True,
        ),
        Died(
            -11,
            "Fatal Python error: Segmentation fault\n\n"
            "Current thread 0x1 (most recent call first):\n"
            '  File "mine.py", line 7 in allreduce\n\n'
            "Extension modules: numpy.core",
            "all_reduce #1 on group 'default', float32 (5,)",
            True,
        ),
        Returned({"a": "x" * 100}),
    ]
    lines = "\n".join(f"line {n}" for n in range(50))
    run = last_run(outcomes, ["", lines, "", "not shown"], earlier=[(sums, [()])])
    text = failed(RanksFailed("sums", outcomes), run, parameters={}, world_size=4)
    assert "sums, run 2 of this world:\n  rank 0  raised ValueError: no\n" in text
    assert "  rank 1  waiting in barrier #1 on group 'default' at the deadline\n" in text
    assert "  rank 2  died: SIGSEGV in all_reduce #1 on group 'default', float32 (5,)\n" in text
    assert '    File "mine.py", line 7 in allreduce\n\n' in text
    assert "Extension modules" not in text
    assert "  rank 3  returned {'a': 'xxxxx" in text
    assert "rank 1 waited in barrier #1 on group 'default'; rank 0 had raised; rank 2 had" in text
    assert "rank 0 raised:\n    Traceback\n      here\n    ValueError: no\n" in text
    assert '    File "case.py", line 3 in sums\n    \n    Thread 0x2' in text
    assert "forkserver" not in text, "the harness's own frames are the same everywhere"
    assert "rank 1 printed:\n    line 20\n" in text
    assert "not shown" not in text
    assert "parameters" not in text


def test_the_example_of_a_property_is_shown_with_every_kind_of_error() -> None:
    note = "Falsifying example: test_x(\n    n=3,\n)"
    errors: list[BaseException] = [
        CheckFailed("wrong"),
        RanksFailed("sums", [Died(1)]),
        IndexError("a bug"),
    ]
    for error in errors:
        error.__notes__ = [note]  # as Hypothesis sets it
        text = failed(error, last_run([Returned(1)]))
        assert note in text


def test_a_bug_of_the_case_shows_its_traceback_from_the_case_on() -> None:
    with pytest.raises(ZeroDivisionError) as error:
        print(1 // 0)
    text = failed(error.value, None, verdict=Verdict.UNKNOWN, verdicts={})
    assert text.startswith("unknown; the case covers no requirement\n")
    assert "ZeroDivisionError" in text
    assert f'File "{HERE}"' in text


# ---- The command


def words(
    nodeid: str, invocation: Invocation, device: str | None = None, **given: Any
) -> list[str]:
    path = invocation.rootdir / nodeid.partition("::")[0]
    return command_again(nodeid, path, invocation, replace(settings(), **given), device)[3:]


ROOT = Invocation(Path("/project"), Path("/project"))
ELSEWHERE = Invocation(Path("/project"), Path("/home/me"))


def test_the_command_is_short_where_pytest_was_called_in_its_root() -> None:
    assert words("tests/test_x.py::test_x[ws2-a b]", ROOT) == [
        *("-p", "conformance.plugin"),
        "tests/test_x.py::test_x[ws2-a b]",
        *("--target", "sample.toml"),
    ]


def test_the_command_works_from_everywhere_otherwise() -> None:
    assert words("tests/test_x.py::test_x", ELSEWHERE, spec="torch@a.toml") == [
        *("-p", "conformance.plugin", "--rootdir", "/project"),
        "/project/tests/test_x.py::test_x",
        *("--target", "torch@/home/me/a.toml"),
    ]


def test_the_command_repeats_what_changes_a_case() -> None:
    command = words("test_x.py::test_x", ROOT, "cuda", world_sizes=(2, 4), deadline_s=2.5)
    assert shlex.join(command).endswith(
        "--target sample.toml --world-sizes 2,4 --device cuda --deadline 2.5"
    )


def test_cases_of_the_suite_bring_the_plugin_along() -> None:
    root = HERE.parents[2]
    nodeid = "conformance/spec/collectives/test_values.py::test_x"
    assert words(nodeid, Invocation(root, root))[0] == nodeid


def test_the_command_names_the_file_of_a_suite_that_is_elsewhere() -> None:
    chapter = Path(conformance.__file__).parent / "spec" / "p2p" / "send_recv.py"
    command = command_again("spec/p2p/send_recv.py::test_x[ws2]", chapter, ROOT, settings(), None)
    assert command[3:] == [
        *("--rootdir", "/project"),
        f"{chapter}::test_x[ws2]",
        *("--target", "/project/sample.toml"),
    ]


def test_the_command_names_a_python_that_has_pytest() -> None:
    python, *module = command_again("x.py::x", Path("/project/x.py"), ROOT, settings(), None)[:3]
    assert python in ("python", sys.executable)
    assert module == ["-m", "pytest"]

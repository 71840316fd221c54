"""What a failing case prints: what should hold, what was seen on each rank, how to see it again."""

from __future__ import annotations

import linecache
import shlex
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from torch import Tensor

from conformance.catalogue.rules import catalogue
from conformance.checks import CheckFailed
from conformance.checks.compare import describe, shown
from conformance.harness.failure import RanksFailed
from conformance.harness.outcome import (
    Died,
    NotAsked,
    Outcome,
    Raised,
    Returned,
    StillRunning,
    describe_hang,
    message_of,
)
from conformance.harness.ranks import LastRun
from conformance.report.plain import plain
from conformance.target import Target
from conformance.verdict import Verdict

_OUTPUT_LINES = 30
_WORKER = str(Path("conformance", "harness", "worker.py"))


@dataclass(frozen=True, slots=True)
class FailedCase:
    """A case that failed, with all that its report needs.

    verdict: of the case as it was seen, before deviations were looked at.
    verdicts: requirement id -> verdict; empty for a case that covers none.
    parameters: name -> value, the world size left out.
    path: the case's file.
    command: words of a command that runs this case again.
    script: the path of a stand-alone script, or why there is none.
    """

    target: Target
    verdict: Verdict
    verdicts: Mapping[str, Verdict]
    world_size: int | None
    parameters: Mapping[str, object]
    path: Path
    error: BaseException
    last_run: LastRun | None
    command: Sequence[str]
    script: str


def failure_text(case: FailedCase) -> str:
    """The report, as plain text."""
    parts = [_requirements(case), _circumstances(case), _ranks(case), _story(case), _again(case)]
    return plain("\n\n".join(part for part in parts if part))


def _requirements(case: FailedCase) -> str:
    lines = []
    for id, verdict in case.verdicts.items():
        requirement = catalogue()[id]
        lines += [
            f"{id}  {verdict}",
            f"  {requirement.level}: {requirement.says}",
            f"  source: {requirement.source}",
        ]
    return "\n".join(lines) or f"{case.verdict}; the case covers no requirement"


def _circumstances(case: FailedCase) -> str:
    facts = {"target": f"{case.target.name} (backend {case.target.backend})"}
    if case.world_size is not None:
        facts["world size"] = str(case.world_size)
    if case.parameters:
        texts = {k: getattr(v, "__name__", shown(v, str)) for k, v in case.parameters.items()}
        facts["parameters"] = ", ".join(f"{k}={text}" for k, text in texts.items())
    if case.last_run is not None and case.last_run.spec.device != "cpu":
        facts["device"] = case.last_run.spec.device
    return "\n".join(f"{name:<12}{fact}" for name, fact in facts.items())


def _ranks(case: FailedCase) -> str:
    run = case.last_run
    if run is None:
        return ""
    outcomes = case.error.outcomes if isinstance(case.error, RanksFailed) else run.outcomes
    wrong = case.error.ranks if isinstance(case.error, CheckFailed) else ()
    name = getattr(run.function, "__name__", repr(run.function))
    lines = [f"{name}{f', run {len(run.earlier) + 1} of this world' if run.earlier else ''}:"]
    for rank, outcome in enumerate(outcomes):
        mark = "   <- differs" if rank in wrong else ""
        lines.append(f"  rank {rank}  {_brief(outcome)}{mark}")
    hang = describe_hang(outcomes)
    if hang:
        lines.append(hang)
    # Where a rank failed, what those printed that returned is no part of the story.
    checked = not isinstance(case.error, RanksFailed)
    for rank, outcome in enumerate(outcomes):
        if checked or not isinstance(outcome, Returned | NotAsked):
            lines += _details(rank, outcome, run.outputs[rank] if rank < len(run.outputs) else "")
    return "\n".join(lines)


def _brief(outcome: Outcome) -> str:
    if not isinstance(outcome, Returned):
        return str(outcome)
    value = outcome.value
    text = describe(value) if isinstance(value, Tensor) else shown(value).replace("\n", " ")
    return f"returned {text if len(text) <= 60 else text[:57] + '...'}"


def _details(rank: int, outcome: Outcome, output: str) -> list[str]:
    lines = []
    if isinstance(outcome, Raised) and outcome.traceback:
        lines += [f"\nrank {rank} raised:", _indented(outcome.traceback)]
    if isinstance(outcome, StillRunning | Died) and outcome.stacks:
        stacks = _without_harness(outcome.stacks)
        lines += [f"\nrank {rank}'s stacks, innermost call first:", _indented(stacks)]
    if output.strip():
        tail = "\n".join(output.splitlines()[-_OUTPUT_LINES:])
        lines += [f"\nrank {rank} printed:", _indented(tail)]
    return lines


def _without_harness(stacks: str) -> str:
    """Stacks without the frames below a rank's function, which are the same in every report, and
    without the list of extension modules that follows those of a rank that died."""
    lines = []
    below = False
    for line in stacks.partition("\nExtension modules:")[0].splitlines():
        below = (below and line.startswith(" ")) or _WORKER in line
        if not below:
            lines.append(line)
    return "\n".join(lines)


def _story(case: FailedCase) -> str:
    """What the case's own process has to say: the failing check, or the whole exception."""
    notes = "".join(f"\n{note}" for note in getattr(case.error, "__notes__", ()))  # Hypothesis's
    if isinstance(case.error, RanksFailed):
        return notes.strip()
    in_case = _from_file(case.error.__traceback__, case.path)
    if isinstance(case.error, AssertionError):
        return f"{message_of(case.error)}\n{_line(in_case)}{notes}"
    error = case.error.with_traceback(in_case or case.error.__traceback__)
    return "".join(traceback.format_exception(error)).rstrip()


def _from_file(tb: TracebackType | None, path: Path) -> TracebackType | None:
    """The traceback from the first frame in this file on: above it is pytest alone."""
    while tb is not None and tb.tb_frame.f_code.co_filename != str(path):
        tb = tb.tb_next
    return tb


def _line(tb: TracebackType | None) -> str:
    if tb is None:
        return ""
    last = tb
    while (
        last.tb_next and last.tb_next.tb_frame.f_code.co_filename == tb.tb_frame.f_code.co_filename
    ):
        last = last.tb_next
    file = last.tb_frame.f_code.co_filename
    return f"checked at {file}:{last.tb_lineno}: {linecache.getline(file, last.tb_lineno).strip()}"


def _again(case: FailedCase) -> str:
    return f"again:  {shlex.join(case.command)}\nalone:  {case.script}"


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.rstrip().splitlines())

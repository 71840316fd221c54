"""The subcommand `ask`: runs a rule's cases on several targets and compares their results."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from conformance.catalogue.rules import catalogue
from conformance.cli.tables import STYLES, show_json
from conformance.exit_codes import EXIT_HARNESS_FAULT, EXIT_USAGE
from conformance.rule import UnknownRequirement
from conformance.run.settings import UsageError

# Of one target: a line for each case, and in the end the verdict of each rule.
Run = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Answer:
    """What one target did in one case.

    verdict: of the rule, in this case.
    answer: a line for each group of ranks with the same outcome.
    """

    case: str
    target: str
    verdict: str
    answer: str


@dataclass(frozen=True, slots=True)
class Answers:
    """Of one rule: the verdict of each target, and what it did in each case."""

    rule: str
    verdicts: dict[str, str]
    answers: tuple[Answer, ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `ask`."""
    parser.add_argument("id", help="the id of a rule, or a pattern such as 'all_reduce/avg*'")
    parser.add_argument(
        "--targets",
        default="impl,torch",
        metavar="NAME,...",
        help="each as of certify --target (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.epilog = (
        "Runs the rule's cases on each target in turn. Exit code: 0 when all were asked, whatever "
        "they said; 2 for a rule or a target that is not there; 3 for a fault of the harness."
    )


def run(arguments: argparse.Namespace) -> int:
    """Ask, and show; the exit code."""
    try:
        ids = [requirement.id for requirement in catalogue().matching(arguments.id)]
    except UnknownRequirement as error:
        raise UsageError(error.args[0]) from error
    targets = [name for name in dict.fromkeys(arguments.targets.split(",")) if name]
    if not targets:
        raise UsageError("--targets names no target")
    code = 0
    runs: dict[str, Run] = {}
    for target in targets:
        with tempfile.TemporaryDirectory(prefix="conformance-") as folder:
            code_of_run, runs[target] = _certify(arguments.id, target, Path(folder))
        code = max(code, code_of_run)
    found = [answers_of(id, runs) for id in ids]
    if arguments.json:
        show_json([asdict(answers) for answers in found])
    else:
        for answers in found:
            _show(answers, targets)
    return code


def _certify(rule: str, target: str, folder: Path) -> tuple[int, Run]:
    """The exit code, 0 whatever the verdicts are, and what the plugin `answers` noted.

    In a process of its own, so that a target finds nothing that another one has set up.
    """
    noted = folder / "answers"
    command = [sys.executable, "-m", "conformance", "certify", "--requirement", rule]
    command += ["--target", target, "--certificate", str(folder / "certificate"), "-n", "0", "-q"]
    command += ["-p", "conformance.session.answers", "--answers", str(noted)]
    ended = subprocess.run(command, capture_output=True, text=True)
    run = [json.loads(line) for line in noted.read_text().splitlines()] if noted.exists() else []
    if ended.returncode == EXIT_USAGE and not run:
        said = ended.stderr.strip() or ended.stdout.strip()
        raise UsageError(said.rpartition("\n")[2].removeprefix("ERROR: "))
    if 0 <= ended.returncode <= EXIT_USAGE:  # 2 also where the target exercises none of it
        return 0, run
    print(f"{target}: {ended.stdout}\n{ended.stderr}", file=sys.stderr)
    return EXIT_HARNESS_FAULT, run


def answers_of(rule: str, runs: Mapping[str, Run]) -> Answers:
    """What each target's run says of the rule."""
    verdicts = {}
    found: dict[tuple[str, str], Answer] = {}
    for target, run in runs.items():
        verdicts[target] = "unknown"
        for line in run:
            if "rules" in line:
                verdicts[target] = line["rules"].get(rule, "not exercised")
            elif rule in line["verdicts"]:
                answer = Answer(line["case"], target, line["verdicts"][rule], line["answer"])
                found[line["case"], target] = answer  # of the last run, should it be repeated
    return Answers(rule, verdicts, tuple(found.values()))


def _show(answers: Answers, targets: Sequence[str]) -> None:
    if not sys.stdout.isatty():
        for target, verdict in answers.verdicts.items():
            print("\t".join([answers.rule, "", target, verdict, ""]))
        for one in answers.answers:
            said = one.answer.replace("\n", "; ")
            print("\t".join([answers.rule, one.case, one.target, one.verdict, said]))
        return
    console = Console()
    console.print(Text(answers.rule, style="bold"))
    console.print(Text(catalogue()[answers.rule].says), "\n")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_lines=True)
    table.add_column("case", ratio=1, overflow="fold")
    for target in targets:
        heading = Text.assemble(f"{target}: ", _styled(answers.verdicts[target]))
        table.add_column(heading, ratio=2, overflow="fold")
    for cases, cells in rows_of(answers.answers, targets):
        table.add_row("\n".join(cases), *(_cell(cell) for cell in cells))
    console.print(table)


def rows_of(
    answers: Sequence[Answer], targets: Sequence[str]
) -> Iterator[tuple[list[str], list[Answer | None]]]:
    """Cases with what each target did in them; those with the same answers are one row."""
    by_case: dict[str, dict[str, Answer]] = {}
    for answer in answers:
        by_case.setdefault(answer.case, {})[answer.target] = answer
    rows: dict[tuple[tuple[str, str] | None, ...], list[str]] = {}
    for case, given in by_case.items():
        cells = (given.get(target) for target in targets)
        key = tuple((cell.verdict, cell.answer) if cell else None for cell in cells)
        rows.setdefault(key, []).append(case)
    for cases in rows.values():
        yield cases, [by_case[cases[0]].get(target) for target in targets]


def _cell(answer: Answer | None) -> Text:
    if answer is None:
        return Text("not asked", style="dim")
    return Text.assemble(_styled(answer.verdict), f": {answer.answer}")


def _styled(verdict: str) -> Text:
    return Text(verdict, style=STYLES.get(verdict, ""))

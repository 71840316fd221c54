"""The subcommand `power`: runs the suite on mutants in parallel, and prints the score."""

from __future__ import annotations

import argparse
import hashlib
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeVar

from conformance.exit_codes import EXIT_HARNESS_FAULT
from conformance.power.defects import OPERATIONS
from conformance.power.generated_mutants import CONTROL, SITUATIONS, GeneratedMutant, all_mutants
from conformance.power.judging import Judged, Mutant, Rules, Task
from conformance.power.reach import Reach
from conformance.power.source_loading import first_lines, modules_of
from conformance.power.source_mutants import OF, SourceMutant, mutants_of, noting
from conformance.power.workers import Workers
from conformance.report.power_score import Score, note
from conformance.run.settings import UsageError, read_settings

_PROFILES = "collectives,p2p,faults"

M = TypeVar("M", bound=Mutant)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `power`."""
    parser.add_argument(
        "patterns",
        nargs="*",
        metavar="MUTANT",
        help="names, or patterns such as 'all_reduce__*' (default: all)",
    )
    parser.add_argument(
        "--source",
        metavar="PACKAGE",
        help="take mutants of the source of this package, such as impl.ddp, instead of generated "
        "backends",
    )
    parser.add_argument(
        "--of",
        default="impl",
        metavar="TARGET",
        help="with --source, the target that the package is part of (default: %(default)s)",
    )
    parser.add_argument(
        "--sample", type=_count, metavar="N", help="draw this many of them (default: all)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of --sample (default: %(default)s)")
    parser.add_argument(
        "--control",
        action="store_true",
        help="take the same backend without a bug, once for each operation: nothing may be held "
        "against it",
    )
    parser.add_argument(
        "--profile", default=_PROFILES, metavar="P,...", help="whose rules (default: %(default)s)"
    )
    parser.add_argument(
        "--requirement",
        action="append",
        default=[],
        metavar="ID",
        help="only these rules, by id or pattern",
    )
    parser.add_argument(
        "--reached",
        type=Path,
        metavar="FILE",
        help="run on each mutant only the cases that reach what is wrong with it; a run of all "
        "cases finds them out if there is no such file yet",
    )
    parser.add_argument(
        "--deadline",
        type=float,
        default=10.0,
        metavar="SECONDS",
        help="of each run of the ranks (default: %(default)s)",
    )
    parser.add_argument(
        "--workers", type=_count, default=2, metavar="N", help="processes (default: %(default)s)"
    )
    parser.add_argument(
        "--record",
        action="store_true",
        help="write the score into the suite, whose certificates then tell it",
    )
    parser.add_argument("--list", action="store_true", help="only name them")
    parser.epilog = (
        "A mutant is torch's gloo with one bug of one operation under one condition, or with "
        "--source a package with one small change. It is killed as soon as something is held "
        "against it. Exit code: 0 if all were killed (with --control, none), 1 if not, 2 for bad "
        "usage, 3 if the harness failed."
    )


def _count(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return int(text)


def run(arguments: argparse.Namespace) -> int:
    """Judge the mutants, and tell; the exit code."""
    if arguments.record and (arguments.control or arguments.patterns or arguments.requirement):
        raise UsageError("--record is of mutants drawn from all, by all rules of the profiles")
    os.environ[OF] = arguments.of
    mutants = chosen(arguments)
    if arguments.list:
        print("\n".join(mutant.name for mutant in mutants))
        return 0
    read_settings(  # so that what is wrong with the options is said here, and once
        target=arguments.of if arguments.source else mutants[0].spec,
        world_sizes=None,
        profiles=arguments.profile,
        requirements=arguments.requirement,
        certificate=None,
        device=None,
        deadline_s=arguments.deadline,
    )
    rules = Rules(arguments.profile, tuple(arguments.requirement))
    workers = Workers(arguments.workers, rules, arguments.deadline)
    judged = []
    tasks = tasks_of(mutants, _numbered(arguments), reach_of(arguments, workers))
    for one in workers.judged(tasks):
        judged.append(one)
        print(_line(one), flush=True)
    print()
    known = [one for one in judged if not one.is_unknown]
    print("\n".join(summary(known)))
    if len(known) < len(mutants):
        print(f"{len(mutants) - len(known)} were not judged: the harness failed")
        return EXIT_HARNESS_FAULT
    if arguments.record:
        note(score_of(known, arguments))
    return int(any(one.is_killed == arguments.control for one in known))


def score_of(judged: Sequence[Judged], arguments: argparse.Namespace) -> Score:
    """As certificates tell it."""
    outcomes = Counter(map(_outcome, judged))
    source = arguments.source
    return {
        "mutants": f"{source} with one change" if source else "torch's gloo with one bug",
        "profiles": arguments.profile,
        "drawn": len(judged),
        "of": len(_of_source(source)) if source else len(list(all_mutants())),
        "seed": arguments.seed,
        "killed": outcomes["killed"],
        "run": len(judged) - outcomes["not run"],
        "date": datetime.now(timezone.utc).date().isoformat(),
    }


def controls() -> list[GeneratedMutant]:
    """The backend without a bug, once for each operation."""
    return [GeneratedMutant(operation, CONTROL, "always") for operation in OPERATIONS]


def chosen(arguments: argparse.Namespace) -> Sequence[Mutant]:
    """Those that the patterns name, or some of them. Raises UsageError if there are none."""
    if arguments.source:
        if arguments.control:
            raise UsageError("--control is of generated mutants, and --source of others")
        return _drawn(_of_source(arguments.source), arguments)
    return _drawn(controls() if arguments.control else list(all_mutants()), arguments)


def _of_source(package: str) -> list[SourceMutant]:
    try:
        return mutants_of(package)
    except ModuleNotFoundError as error:
        raise UsageError(f"--source {package}: {error}") from error


def _drawn(mutants: list[M], arguments: argparse.Namespace) -> list[M]:
    patterns = arguments.patterns or ["*"]
    found = [m for m in mutants if any(fnmatchcase(m.name, p) for p in patterns)]
    if not found:
        raise UsageError(f"no mutant is called {' or '.join(patterns)}; --list names them")
    if arguments.sample is None or arguments.sample >= len(found):
        return found
    return random.Random(arguments.seed).sample(found, arguments.sample)


def tasks_of(mutants: Sequence[Mutant], numbered: Numbered, reach: Reach) -> list[Task]:
    """Each with the cases that can notice it."""
    known = frozenset(reach.cases)
    return [Task(m, reach.reaching(numbered.numbers(m)), known) for m in mutants]


def reach_of(arguments: argparse.Namespace, workers: Workers) -> Reach:
    """What the cases reach: from the file that has it, or by running all of them.

    Nothing is known without a file. Raises UsageError for a file about something else.
    """
    numbered, file = _numbered(arguments), arguments.reached
    if file is None:
        return Reach(numbered.of, {})
    if file.exists():
        try:
            reach = Reach.read(file)
        except ValueError as error:
            raise UsageError(f"--reached {file}: {error}") from error
        if reach.of != numbered.of:
            raise UsageError(f"--reached {file} is about another source or other rules")
        return reach
    reach = Reach(numbered.of, workers.reach(numbered.spec, numbered.count))
    reach.write(file)
    return reach


@dataclass(frozen=True, slots=True)
class Numbered:
    """What cases may reach, as numbers.

    of: tells apart what is numbered, in texts that can be compared.
    spec: the target that marks what is reached, as `--target` takes it.
    count: how many numbers there are.
    numbers: those of which a case that is to notice a mutant reaches one; None if any case may.
    """

    of: str
    spec: str
    count: int
    numbers: Callable[[Any], frozenset[int] | None]


def _numbered(arguments: argparse.Namespace) -> Numbered:
    rules = f"{arguments.profile} {arguments.requirement}"
    if not arguments.source:
        of = f"{rules} {' '.join(map('__'.join, SITUATIONS))}"
        spec = controls()[0].spec
        return Numbered(of, spec, len(SITUATIONS), lambda m: frozenset([m.situation]))
    begins, count = first_lines(arguments.source)
    sources = (path.read_bytes() for path in modules_of(arguments.source).values())
    digest = hashlib.sha256(b"\0".join(sources)).hexdigest()
    of = f"{rules} {arguments.of} {arguments.source} {digest}"

    def lines(mutant: SourceMutant) -> frozenset[int] | None:
        line = mutant.mutation.statement_line
        # What runs when a module is imported may show anywhere.
        return frozenset([begins[mutant.module] + line]) if line else None

    return Numbered(of, noting(arguments.source), count, lines)


def _line(one: Judged) -> str:
    said = one.mutant.says
    if one.is_unknown:
        return f"unknown   {said}"
    if one.is_killed:
        return f"killed    {said}  by {one.rule}, {one.verdict}, {one.seconds:.1f} s: {one.blame}"
    if not one.is_reached:
        return f"not run   {said}"
    return f"survived  {said}  {one.cases} cases, {one.seconds:.1f} s"


def summary(judged: Sequence[Judged]) -> Iterator[str]:
    """The score, by each of the kinds that the mutants have."""
    for name in judged[0].mutant.kinds if judged else ():
        values = [one.mutant.kinds[name] for one in judged]
        outcomes = Counter(zip(values, map(_outcome, judged), strict=True))
        yield f"{name:<44} {'killed':>8} {'survived':>8} {'not run':>8}"
        for value in dict.fromkeys(values):
            row = (outcomes[value, outcome] for outcome in ("killed", "survived", "not run"))
            yield f"{value:<44} " + " ".join(f"{count:>8}" for count in row)
        yield ""
    in_all = Counter(map(_outcome, judged))
    killed, run = in_all["killed"], len(judged) - in_all["not run"]
    if in_all["not run"]:
        yield f"{in_all['not run']} of {len(judged)} are not run by any case"
    yield f"{killed} of {run} killed, {100 * killed / max(1, run):.0f} percent"


def _outcome(one: Judged) -> str:
    if one.is_killed:
        return "killed"
    return "survived" if one.is_reached else "not run"

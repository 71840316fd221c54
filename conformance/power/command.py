"""The subcommand `power`: runs the suite on generated mutants in parallel, and prints the score."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import queue
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

from conformance.exit_codes import EXIT_HARNESS_FAULT
from conformance.power.defects import DEFECTS, OPERATIONS
from conformance.power.generated_mutants import CONTROL, Mutant, all_mutants
from conformance.power.judging import Judged, judge_all, shares
from conformance.run.settings import UsageError, read_settings

_PROFILES = "collectives,p2p,faults"
_ASK_AGAIN_S = 1.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `power`."""
    parser.add_argument(
        "patterns",
        nargs="*",
        metavar="MUTANT",
        help="names, or patterns such as 'all_reduce__*' (default: all)",
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
        "--deadline",
        type=float,
        default=10.0,
        metavar="SECONDS",
        help="of each run of the ranks (default: %(default)s)",
    )
    parser.add_argument(
        "--workers", type=_count, default=2, metavar="N", help="processes (default: %(default)s)"
    )
    parser.add_argument("--list", action="store_true", help="only name them")
    parser.epilog = (
        "A mutant is torch's gloo with one bug of one operation under one condition. It is killed "
        "as soon as something is held against it. Exit code: 0 if all were killed (with --control, "
        "none), 1 if not, 2 for bad usage, 3 if the harness failed."
    )


def _count(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return int(text)


def run(arguments: argparse.Namespace) -> int:
    """Judge the mutants, and tell; the exit code."""
    mutants = chosen(arguments)
    if arguments.list:
        print("\n".join(mutant.name for mutant in mutants))
        return 0
    read_settings(  # so that what is wrong with the options is said here, and once
        target=mutants[0].spec,
        world_sizes=None,
        profiles=arguments.profile,
        requirements=[],
        certificate=None,
        device=None,
        deadline_s=arguments.deadline,
    )
    judged = []
    for one in _judged(mutants, arguments):
        judged.append(one)
        print(_line(one), flush=True)
    print()
    known = [one for one in judged if one.cases]
    print("\n".join(summary(known)))
    if len(known) < len(mutants):
        print(f"{len(mutants) - len(known)} were not judged: the harness failed")
        return EXIT_HARNESS_FAULT
    return int(any(one.is_killed == arguments.control for one in known))


def controls() -> list[Mutant]:
    """The backend without a bug, once for each operation."""
    return [Mutant(operation, CONTROL, "always") for operation in OPERATIONS]


def chosen(arguments: argparse.Namespace) -> list[Mutant]:
    """Those that the patterns name, or some of them. Raises UsageError if there are none."""
    patterns = arguments.patterns or ["*"]
    all_there_are = controls() if arguments.control else all_mutants()
    found = [m for m in all_there_are if any(fnmatchcase(m.name, p) for p in patterns)]
    if not found:
        raise UsageError(f"no mutant is called {' or '.join(patterns)}; --list names them")
    if arguments.sample is None or arguments.sample >= len(found):
        return found
    return random.Random(arguments.seed).sample(found, arguments.sample)


def _judged(mutants: Sequence[Mutant], arguments: argparse.Namespace) -> Iterator[Judged]:
    """As they come, from all workers, until each has ended."""
    context = multiprocessing.get_context("spawn")
    done = context.Queue()
    with tempfile.TemporaryDirectory(prefix="conformance-") as folder:
        workers = [
            context.Process(
                target=judge_all,
                args=(share, arguments.profile, arguments.deadline, f"{folder}/{i}", done),
            )
            for i, share in enumerate(shares(mutants, arguments.workers))
        ]
        for i, worker in enumerate(workers):
            os.mkdir(f"{folder}/{i}")
            worker.start()
        try:
            yield from _until_all_end(workers, done)
        finally:
            for worker in workers:
                worker.terminate()
                worker.join()


def _until_all_end(workers: Sequence[Any], done: Any) -> Iterator[Judged]:
    while any(worker.is_alive() for worker in workers):
        try:
            yield done.get(timeout=_ASK_AGAIN_S)
        except queue.Empty:
            continue
    while not done.empty():
        yield done.get()


def _line(one: Judged) -> str:
    if not one.cases:
        return f"unknown   {one.mutant.name}"
    if one.is_killed:
        by = f"by {one.rule}, {one.verdict}, {one.seconds:.1f} s: {one.blame}"
        return f"killed    {one.mutant.name}  {by}"
    return f"survived  {one.mutant.name}  {one.cases} cases, {one.seconds:.1f} s"


def summary(judged: Sequence[Judged]) -> Iterator[str]:
    """The score, by each of the three tables that the mutants are made of."""
    groups: dict[str, Callable[[Judged], str]] = {
        "operation": lambda one: one.mutant.operation,
        "defect": lambda one: one.mutant.defect,
        "condition": lambda one: one.mutant.condition,
    }
    for name, key in groups.items():
        total = Counter(map(key, judged))
        killed = Counter(key(one) for one in judged if one.is_killed)
        yield f"{name:<34} {'killed':>7} {'of':>5}"
        yield from (f"{value:<34} {killed[value]:>7} {total[value]:>5}" for value in total)
        yield ""
    for name in sorted({one.mutant.defect for one in judged if not one.is_killed}):
        yield f"{name}: {DEFECTS[name].says}"
    killed_in_all = sum(one.is_killed for one in judged)
    share = 100 * killed_in_all / max(1, len(judged))
    yield f"{killed_in_all} of {len(judged)} killed, {share:.0f} percent"

"""Checks that order of cases, number of workers and load do not change a certificate, by many runs.

Runs the suite on one target in one way after another, and compares what each run says of every
requirement and every case with what the first run says. Prints a row for each run as it ends. The
exit code is 1 if a run has a failure or says something else than the first. A difference is marked
as chance if the target declares that this may break, and it did so in one of the two runs alone.

    python -m ci.repeat --target torch --orders 3 --workers 1,2,4,8
    python -m ci.repeat --times 20            # each with a seed of its own, half of them under load
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conformance.verdict import REFUSES_CERTIFICATE, Verdict

RED = {str(verdict) for verdict in REFUSES_CERTIFICATE | {Verdict.UNKNOWN}}
_DEFAULT_WORKERS = 4
_COLUMNS = "{:<26} {:>9} {:>7} {:>5} {:>10} {:>7} {:>8}"
_SHOWN = 10


@dataclass(frozen=True, slots=True)
class Way:
    """One way to run the suite.

    order_seed: decides a random order; None for the suite's own.
    seed: decides what drawn cases draw; None for what they draw in every run.
    is_loaded: whether every processor has something else to do.
    """

    name: str
    workers: int = _DEFAULT_WORKERS
    order_seed: int | None = None
    seed: int | None = None
    is_loaded: bool = False


@dataclass(frozen=True, slots=True)
class Difference:
    """Two verdicts on a requirement, or on one of its cases."""

    requirement: str
    case: str
    was: str
    now: str

    def __str__(self) -> str:
        chance = " (chance)" * self.is_by_chance
        return f"{self.requirement} {self.case}: {self.was} -> {self.now}{chance}"

    @property
    def is_by_chance(self) -> bool:
        """Whether the target declares that this may break, and it did so in one run alone."""
        return {self.was, self.now} == {str(Verdict.HOLDS), str(Verdict.DEVIATION)}


Verdicts = dict[tuple[str, str], str]


def ways(orders: int, workers: Sequence[int], times: int, first_seed: int = 1) -> Iterator[Way]:
    """The runs that were asked for.

    Each repetition has a seed for its order and for drawn cases; every second is under load.
    """
    for seed in range(1, orders + 1):
        yield Way(f"order {seed}", order_seed=seed)
    for count in workers:
        yield Way(f"-n {count}", workers=count)
    for seed in range(first_seed, first_seed + times):
        is_loaded = seed % 2 == 0
        name = f"seed {seed}{' loaded' * is_loaded}"
        yield Way(name, order_seed=seed, seed=seed, is_loaded=is_loaded)


def verdicts_of(document: dict[str, Any]) -> Verdicts:
    """(requirement, case or "") -> verdict."""
    found: Verdicts = {}
    for row in document["requirements"]:
        found[row["id"], ""] = row["verdict"]
        found.update({(row["id"], case["case"]): case["verdict"] for case in row["cases"]})
    return found


def differences(first: Verdicts, other: Verdicts) -> list[Difference]:
    """What the two runs say otherwise, of requirements and of cases."""
    pairs = (
        Difference(id, case, first.get((id, case), "absent"), other.get((id, case), "absent"))
        for id, case in sorted({*first, *other})
    )
    return [pair for pair in pairs if pair.was != pair.now]


def run(
    way: Way,
    target: str,
    folder: Path,
    rest: Sequence[str],
    python: str = sys.executable,
    launch: Sequence[str] = (),
) -> dict[str, Any]:
    """Run the suite once; its certificate. Raises SystemExit where there is none.

    launch: a launcher's command, such as ("mpirun", "-n", "3"); there are no workers then.
    """
    command = [*launch, python, "-m", "pytest", "-q", "-p", "ci.random_order", "conformance"]
    command += [] if launch else ["-n", str(way.workers)]
    command += ["--target", target, "--certificate", str(folder), *rest]
    if way.order_seed is not None:
        command += ["--order-seed", str(way.order_seed)]
    if way.seed is not None:
        command += ["--seed", str(way.seed)]
    shutil.rmtree(folder, ignore_errors=True)  # what an earlier one found is not this one's
    folder.mkdir(parents=True)
    log = folder / "log.txt"
    with log.open("w") as output, _load() if way.is_loaded else contextlib.nullcontext():
        code = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT).returncode
    written = sorted(folder.rglob("certificate.json"))
    if not written:
        raise SystemExit(f"{way.name}: no certificate, exit code {code}; see {log}")
    document: dict[str, Any] = json.loads(written[0].read_text(encoding="utf-8"))
    return document


@contextlib.contextmanager
def _load() -> Iterator[None]:
    """Something else to do for every processor."""
    context = multiprocessing.get_context("spawn")
    loads = [context.Process(target=_spin, daemon=True) for _ in os.sched_getaffinity(0)]
    for load in loads:
        load.start()
    try:
        yield
    finally:
        for load in loads:
            load.kill()
            load.join()


def _spin() -> None:
    while True:
        sum(range(100_000))


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="ci/repeat",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="All other options go on to pytest, such as --profile p2p.",
    )
    parser.add_argument("--target", default="impl", help="as of the suite (default: %(default)s)")
    parser.add_argument("--orders", type=int, default=0, metavar="N", help="random orders")
    parser.add_argument("--workers", default="", metavar="N,...", help="numbers of pytest workers")
    parser.add_argument("--times", type=int, default=0, metavar="N", help="runs with random seeds")
    parser.add_argument("--first-seed", type=int, default=1, metavar="N", help="of --times")
    parser.add_argument("--output", type=Path, default=Path("build/repeat"), metavar="DIR")
    arguments, rest = parser.parse_known_args()
    workers = [int(part) for part in arguments.workers.split(",") if part]
    asked = [Way("first"), *ways(arguments.orders, workers, arguments.times, arguments.first_seed)]

    print(
        _COLUMNS.format("run", "cases", "holds", "reds", "different", "chance", "minutes"),
        flush=True,
    )
    first: Verdicts = {}
    is_steady = True
    for way in asked:
        started = time.monotonic()
        folder = arguments.output / Path(arguments.target).stem / way.name.replace(" ", "_")
        document = run(way, arguments.target, folder, rest)
        minutes = (time.monotonic() - started) / 60
        found = verdicts_of(document)
        first = first or found
        different = differences(first, found)
        rules = [verdict for (_, case), verdict in found.items() if not case]
        cases = {case for _, case in found if case}
        reds = sum(verdict in RED for verdict in rules)
        holds = rules.count(str(Verdict.HOLDS))
        is_steady &= not different and not reds
        chance = sum(each.is_by_chance for each in different)
        row = (way.name, len(cases), holds, reds, len(different), chance, f"{minutes:.1f}")
        print(_COLUMNS.format(*row), flush=True)
        for each in different[:_SHOWN]:
            print(f"    {each}", flush=True)
    return 0 if is_steady else 1


if __name__ == "__main__":
    sys.exit(main())

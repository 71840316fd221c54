"""`ci/simulate`: programs of collectives under schedules of faults, in one simulated process.

    ci/simulate                          # 10,000 schedules, 4 ranks, both wire protocols
    ci/simulate --schedules 500 --ranks 3 --modes tcp --seed 7
    ci/simulate --replay FILE            # one schedule again, as this command has printed it

A schedule is a program, faults (a rank is killed, freezes, pauses or aborts; a connection breaks;
the ranks are parted for a while) and what the network does to bytes. All of it is drawn from the
seed. The first schedule that fails is shrunk to a short one, which is printed. Exit code: 0 if all
was well, 1 if not, 2 for bad usage.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import hypothesis
from hypothesis import HealthCheck, Phase, given, settings

from ci.simulating.judging import judge
from ci.simulating.schedule import Schedule, schedules

MODES = ("tcp", "gloo")
BATCH = 250  # Hypothesis remembers what it has drawn
_TWICE = 20  # one of so many runs twice, for the same trace


class Failed(Exception):
    """A schedule, and what was wrong in it."""

    def __init__(self, schedule: Schedule, problem: str) -> None:
        super().__init__(problem)
        self.schedule, self.problem = schedule, problem


class Tally:
    """Of the schedules that were run, those of shrinking left out."""

    def __init__(self) -> None:
        self.schedules = 0
        self.fired: Counter[str] = Counter()

    def lines(self) -> list[str]:
        faults = ", ".join(f"{kind} {count}" for kind, count in sorted(self.fired.items()))
        return [f"{self.schedules} schedules; faults that came: {faults or 'none'}"]


def explore(count: int, seed: int, world_size: int, mode: str, tally: Tally) -> Failed | None:
    """Draw and judge so many schedules. What fails, shrunk."""

    @hypothesis.seed(seed)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
    )
    @given(schedules(world_size, mode))
    def hold(schedule: Schedule) -> None:
        verdict = judge(schedule)
        problem = verdict.problem
        if not problem and tally.schedules % _TWICE == 0 and judge(schedule).trace != verdict.trace:
            problem = "a second run gave something else"
        if problem:
            raise Failed(schedule, problem)
        tally.schedules += 1
        tally.fired.update(verdict.fired)

    try:
        hold()
    except Failed as failed:
        return failed
    return None


def main(words: Sequence[str] | None = None) -> int:
    arguments = parse(sys.argv[1:] if words is None else words)
    if arguments.replay is not None:
        schedule = Schedule.from_json(arguments.replay.read_text())
        problem = judge(schedule).problem
        print(problem or "all was well")
        return int(bool(problem))
    since_s, tally = time.monotonic(), Tally()
    for batch in range(-(-arguments.schedules // BATCH)):
        mode = arguments.modes[batch % len(arguments.modes)]
        count = min(BATCH, arguments.schedules - batch * BATCH)
        failed = explore(count, arguments.seed + batch, arguments.ranks, mode, tally)
        if failed is not None:
            print(f"{failed.problem}\n{failed.schedule.to_json()}")
            break
    took_s = time.monotonic() - since_s
    print("\n".join(tally.lines()))
    print(f"seed {arguments.seed}, {arguments.ranks} ranks, {took_s:.0f} s")
    return int(failed is not None)


def parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="ci/simulate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--schedules", type=_positive, default=10_000, metavar="N")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=_several, default=4, metavar="N")
    parser.add_argument("--modes", type=_modes, default=MODES, metavar="tcp,gloo")
    parser.add_argument("--replay", type=Path, metavar="FILE")
    return parser.parse_args(words)


def _positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return int(text)


def _several(text: str) -> int:
    if int(text) < 2:
        raise argparse.ArgumentTypeError("at least 2")
    return int(text)


def _modes(text: str) -> tuple[str, ...]:
    modes = tuple(text.split(","))
    if not set(modes) <= set(MODES):
        raise argparse.ArgumentTypeError(f"of {', '.join(MODES)}")
    return modes


if __name__ == "__main__":
    sys.exit(main())

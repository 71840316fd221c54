"""Repeats a failed case on new ranks: only what fails there, too, is the target's fault.

[Note: answers that come with age]
A target may be right in young processes and wrong in old ones: a counter wraps, a slot is lost with
each call. Ranks that have run many cases show it, and fresh ones do not. So a case that was given
wrong values or an error, and passes on fresh ranks, goes on there, run after run in the same
processes. If it is given wrong values again, or the same error, they are the target's. What else a
case may fail by, such as being late, is left at that: it may be the machine's fault, and more runs
would only make that more likely.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import pytest

TIMES = 3
_AGED_RUNS = 200
_AGED_S = 5.0


@dataclass(frozen=True, slots=True)
class Repetition:
    """What became of a failed case when it was run again, each time on fresh ranks.

    passed: how many times it passed before it failed again, or until it was left at that.
    error: how it failed again; None if it did not.
    """

    passed: int
    error: BaseException | None


def repeat(case: Callable[[], None], times: int) -> Repetition:
    """Run the case up to so many times; the first failure ends it."""
    for passed in range(times):
        try:
            case()
        except (KeyboardInterrupt, SystemExit, pytest.exit.Exception):
            raise
        except BaseException as error:
            return Repetition(passed, error)
    return Repetition(times, None)


def repeat_with_age(case: Callable[[], None]) -> Repetition:
    """Run the case again and again, for some seconds, until it fails.

    case: leaves the processes in which it ran as they are.
    """
    until = time.monotonic() + _AGED_S

    def in_time() -> None:
        if time.monotonic() < until:
            case()

    return repeat(in_time, _AGED_RUNS)


def describe_age(case_before: str, times: int, passed: int) -> str:
    """For a case that was given a wrong answer again, but not on fresh ranks.

    passed: how many times it passed after that in the same processes.
    """
    after = f"that had run {case_before} before" if case_before else "that were fresh"
    return (
        f"found on ranks {after}, not found in {times} runs on fresh ranks, and found again in run "
        f"{passed + 2} in the same processes: it comes with the number of calls, or by chance"
    )


def describe_taint(reason: str, case_before: str, times: int) -> str:
    """For a case that did not fail again: what happened, and which case may be the cause.

    case_before: what the same rank processes had run before; "" if they were new.
    """
    after = f"on ranks that had run {case_before} before" if case_before else "on fresh ranks"
    again = f"{times} time{'' if times == 1 else 's'}"
    return f"failed once {after} ({reason}), and passed {again} on fresh ranks"

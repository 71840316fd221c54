"""Repeats a failed case on new ranks: only what fails there, too, is the target's fault."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

TIMES = 3


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


def describe_taint(reason: str, case_before: str, times: int) -> str:
    """For a case that did not fail again: what happened, and which case may be the cause.

    case_before: what the same rank processes had run before; "" if they were new.
    """
    after = f"on ranks that had run {case_before} before" if case_before else "on fresh ranks"
    again = f"{times} time{'' if times == 1 else 's'}"
    return f"failed once {after} ({reason}), and passed {again} on fresh ranks"

"""Limits how long Hypothesis shrinks a failing example, and records the values that it drew.

Hypothesis makes a failing example smaller by trying hundreds of others. Each costs a run of the
ranks; ranks that raise also cost a new world, and ranks that die or hang cost new processes, or a
whole deadline. So from the first failure on there is a limit, of runs and of seconds. When it is
reached, examples that were not tried before are dropped unseen, and the smallest one that failed is
reported. So the limit decides which example is reported, and never the verdict.

Runs are counted first, so that the same example is reported each time; seconds are for targets that
are slow or hang.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, Generic, TypeVar

import hypothesis
import pytest
from hypothesis import Phase, settings
from hypothesis.strategies import DataObject, SearchStrategy

T = TypeVar("T")

_RUNS_MAX = 150
_COST_OF_NEW_WORLD = 6  # in runs
_COST_OF_NEW_PROCESSES = 75
_SECONDS_MAX = 20.0
_SETTINGS_OF_A_TEST = "_hypothesis_internal_use_settings"  # there is no public way to change them


class ShrinkLimit(Generic[T]):
    """What is left to spend on one property; knows runs by what the ranks were told.

    clock: seconds, from any start.
    runs: how many may be made after the first failure.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, runs: int = _RUNS_MAX) -> None:
        self._clock = clock
        self._runs_left = runs
        self._failed_at: float | None = None  # the first example that failed
        self._began_at = 0.0
        self._longest_s = 0.0
        self._seen: set[tuple[bytes, ...]] = set()
        self._failed: dict[tuple[bytes, ...], T] = {}

    def example_begins(self) -> None:
        """Hypothesis calls the property."""
        self._began_at = self._clock()

    def example_failed(self) -> None:
        """Whatever comes from now on is for making an example smaller."""
        now = self._clock()
        self._longest_s = max(self._longest_s, now - self._began_at)
        if self._failed_at is None:
            self._failed_at = now

    def recall(self, payloads: Sequence[bytes]) -> T | None:
        """A run that failed expensively and need not be made again; None to go ahead.

        Makes Hypothesis drop the example if it is a new one and nothing is left to spend.
        """
        key = tuple(payloads)
        if self._failed_at is not None:
            self._runs_left -= 1
        if self._is_reached():
            if key not in self._seen:
                hypothesis.reject()
            return self._failed.get(key)
        self._seen.add(key)
        return None

    def _is_reached(self) -> bool:
        """Whether another failing example could go beyond the limit, if it takes as long as the
        longest so far. One that hangs to its deadline is not tried again."""
        if self._runs_left <= 0 or self._failed_at is None:
            return self._runs_left <= 0
        return self._clock() - self._failed_at + self._longest_s > _SECONDS_MAX

    def note(self, payloads: Sequence[bytes], run: T, *, needed_new_processes: bool) -> None:
        """A run ended without every rank's return."""
        self._runs_left -= _COST_OF_NEW_PROCESSES if needed_new_processes else _COST_OF_NEW_WORLD
        self._failed[tuple(payloads)] = run


def no_shrinking() -> ShrinkLimit[Any]:
    """For a property whose first example that fails is as good as a smaller one."""
    return ShrinkLimit(runs=1)


@contextmanager
def unshrunk(function: Callable[..., None]) -> Iterator[None]:
    """While this lasts, a Hypothesis test ends at its first failing example.

    `no_shrinking` alone saves the runs, but not the drawing of hundreds of smaller examples.
    function: left as it is if it is no Hypothesis test.
    """
    usual: settings | None = getattr(function, _SETTINGS_OF_A_TEST, None)
    if usual is None:
        yield
        return
    function = getattr(function, "__func__", function)
    phases = [phase for phase in usual.phases if phase is not Phase.shrink]
    setattr(function, _SETTINGS_OF_A_TEST, settings(usual, phases=phases))
    try:
        yield
    finally:
        setattr(function, _SETTINGS_OF_A_TEST, usual)


class Draws:
    """Hypothesis's `data`, which draws values while a test runs, and notes them."""

    def __init__(self, data: DataObject) -> None:
        self._data = data
        self.drawn: list[Any] = []

    def draw(self, strategy: SearchStrategy[T], label: Any = None) -> T:
        """As of `data`."""
        value = self._data.draw(strategy, label)
        self.drawn.append(value)
        return value


def limits_shrinking(function: Callable[..., None]) -> None:
    """Have this Hypothesis test limit how long its ranks are tried for making an example smaller.

    Does nothing to a function that is no such test, or to which this was done before. See
    "Custom function execution" in Hypothesis's documentation for `inner_test`.
    """
    handle = getattr(function, "hypothesis", None)
    if handle is None or hasattr(handle.inner_test, "limits_shrinking"):
        return
    inner = handle.inner_test

    @wraps(inner)
    def limited(*args: Any, **kwargs: Any) -> None:
        kwargs = {k: Draws(v) if isinstance(v, DataObject) else v for k, v in kwargs.items()}
        # A test may have its ranks through a fixture of its own: then nothing is known of them.
        ranks = kwargs.get("ranks") or kwargs.get("bare_ranks")
        if ranks is None:
            inner(*args, **kwargs)
            return
        ranks.example = kwargs
        ranks.shrink_limit.example_begins()
        try:
            inner(*args, **kwargs)
        except hypothesis.errors.HypothesisException:
            raise
        except (Exception, pytest.fail.Exception):  # pytest's own is none of the former
            ranks.shrink_limit.example_failed()
            raise

    limited.limits_shrinking = True  # type: ignore[attr-defined]  # a mark for the line above
    handle.inner_test = limited

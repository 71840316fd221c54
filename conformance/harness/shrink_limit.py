"""Keeps a property that fails from being tried for minutes.

Hypothesis makes a failing example smaller by trying hundreds of others. Each costs a run of the
ranks; ranks that raise also cost a new world, and ranks that die or hang cost new processes, or a
whole deadline. So from the first failure on there is a budget. When it is spent, examples that were
not tried before are dropped unseen, and the one that failed is the one that is reported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, Generic, TypeVar

import hypothesis

T = TypeVar("T")

_BUDGET = 150
_COST_OF_NEW_WORLD = 6
_COST_OF_NEW_PROCESSES = 75


class ShrinkLimit(Generic[T]):
    """What is left to spend on one property; knows runs by what the ranks were told."""

    def __init__(self) -> None:
        self._left = _BUDGET
        self._burning = False
        self._seen: set[tuple[bytes, ...]] = set()
        self._failed: dict[tuple[bytes, ...], T] = {}

    def light(self) -> None:
        """An example has failed; whatever comes now is for making it smaller."""
        self._burning = True

    def recall(self, payloads: Sequence[bytes]) -> T | None:
        """A run that failed expensively and need not be made again; None to go ahead.

        Makes Hypothesis drop the example if it is a new one and nothing is left to spend.
        """
        key = tuple(payloads)
        if self._burning:
            self._left -= 1
        if self._left <= 0:
            if key not in self._seen:
                hypothesis.reject()
            return self._failed.get(key)
        self._seen.add(key)
        return None

    def note(self, payloads: Sequence[bytes], run: T, *, needed_new_processes: bool) -> None:
        """A run ended without every rank's return."""
        self._left -= _COST_OF_NEW_PROCESSES if needed_new_processes else _COST_OF_NEW_WORLD
        self._failed[tuple(payloads)] = run


def limits_shrinking(function: Callable[..., None]) -> None:
    """Have this Hypothesis test, on one of its examples, limit how long its ranks are tried.

    Does nothing to a function that is no such test, or to which this was done before. See
    "Custom function execution" in Hypothesis's documentation for `inner_test`.
    """
    handle = getattr(function, "hypothesis", None)
    if handle is None or hasattr(handle.inner_test, "limits_shrinking"):
        return
    inner = handle.inner_test

    @wraps(inner)
    def lit(*args: Any, **kwargs: Any) -> None:
        try:
            inner(*args, **kwargs)
        except hypothesis.errors.HypothesisException:
            raise
        except Exception:
            # A test may have its ranks through a fixture of its own: then nothing is known of them.
            ranks = kwargs.get("ranks") or kwargs.get("bare_ranks")
            if ranks is not None:
                ranks.shrink_limit.light()
            raise

    lit.limits_shrinking = True  # type: ignore[attr-defined]  # a mark for the line above
    handle.inner_test = lit

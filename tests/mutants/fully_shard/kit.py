"""How mutants of fully_shard are written: functions of impl.fully_shard are replaced."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import impl.fully_shard as package


def then(change: Callable[..., object]) -> Callable[[Any], Any]:
    """A function that does what the right one does, and then changes its result or its arguments.

    change: called with the result, and with the arguments of the call.
    """

    def make(right: Any) -> Any:
        @functools.wraps(right)
        def wrong(*args: Any, **kwargs: Any) -> Any:
            result = right(*args, **kwargs)
            change(result, *args)
            return result

        return wrong

    return make


def first(change: Callable[..., object]) -> Callable[[Any], Any]:
    """A function that changes its arguments, and then does what the right one does."""

    def make(right: Any) -> Any:
        @functools.wraps(right)
        def wrong(*args: Any, **kwargs: Any) -> Any:
            change(*args)
            return right(*args, **kwargs)

        return wrong

    return make


def everywhere(right: Any) -> Any:
    """A method for which recurse=False has no effect."""
    return lambda self, value, *, recurse=True: right(self, value)


def fully_shard_then(change: Callable[[Any, Any], object]) -> tuple[Any, str, Any]:
    """A swap: `fully_shard`, whose result is then changed."""
    return package, "fully_shard", then(change)

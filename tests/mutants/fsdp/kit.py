"""How mutants of FSDP are written: functions of impl.fsdp are replaced while a group exists."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar
from unittest import mock

from impl.fsdp.flat_param import config
from tests.mutants.kit import Patch

# What holds a name, the name, and what makes the wrong thing from the right one.
Swap = tuple[Any, str, Callable[[Any], Any]]


class Swapped(Patch):
    """`swaps` are made while the mutant is active."""

    base = "impl"
    swaps: ClassVar[tuple[Swap, ...]]

    @classmethod
    @contextmanager
    def patched(cls) -> Iterator[None]:
        with ExitStack() as stack:
            for owner, name, make in cls.swaps:
                wrong = make(getattr(owner, name))
                stack.enter_context(mock.patch.object(owner, name, wrong))
            yield


def nothing(_: Any) -> Callable[..., None]:
    """Instead of a function one that does nothing."""
    return lambda *args, **kwargs: None


def always(value: Any) -> Callable[[Any], Callable[..., Any]]:
    """Instead of a function one that returns this."""
    return lambda _: lambda *args, **kwargs: value


def as_property(value: Any) -> Callable[[Any], Any]:
    """Instead of a property one that has this value."""
    return lambda _: property(lambda self: value)


KEEPS = (config.HandleConfig, "reshards_after_forward", as_property(False))


FREES = (config.HandleConfig, "reshards_after_forward", as_property(True))


def rolled_afterwards(right: Any) -> Any:
    def wrong(*args: Any, **kwargs: Any) -> Any:
        return right(*args, **kwargs).roll(1, 0)

    return wrong

"""How a case of a store is run: one function on each rank, which tells what is wrong there."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from conformance import Me, Ranks, assert_that
from conformance.spec.facts import unlike
from conformance.spec.waiting import all_are_here

# What a rank finds wrong with the store, one text each; nothing if all is right.
Fact = Callable[[Me, Any], list[str]]

PATIENCE_S = 20.0  # of a store's calls that are meant to succeed
SHORT = timedelta(milliseconds=300)  # of those that are not


def raised(call: Callable[[], Any], *kinds: type[BaseException]) -> str:
    """The exception's message, if it is one of these. Raises AssertionError for anything else, but
    for a refusal, which is raised again."""
    try:
        value = call()
    except NotImplementedError:
        raise
    except kinds as error:
        return str(error)
    except Exception as error:
        wanted = " or ".join(kind.__name__ for kind in kinds)
        raise AssertionError(f"{type(error).__name__} was raised, not {wanted}: {error}") from error
    raise AssertionError(f"nothing was raised; the call returned {value!r}")


def value_of(store: Any, key: str) -> bytes | None:
    """The key's value, or None where `get` would wait for it."""
    return store.get(key) if store.check([key]) else None


def seconds_of(call: Callable[[], Any]) -> float:
    """How long the call takes."""
    begun = time.monotonic()
    call()
    return time.monotonic() - begun


def is_usable(store: Any) -> list[str]:
    """Whether the store still takes a value and gives it back."""
    try:
        store.set("still usable", "yes")
        return unlike("afterwards, a value that was set", store.get("still usable"), b"yes")
    except Exception as error:
        return [f"afterwards the store is of no use: {type(error).__name__}: {error}"]


def is_through(store: Any) -> None:
    """Return when what this rank has told the store is done: a store need not answer a set or an
    append, but it takes what comes from one rank in order."""
    store.check(["any"])


def on_a_store(me: Me, fact: Fact, folder: str) -> list[str]:
    store = me.shared_store(folder, timedelta(seconds=PATIENCE_S))
    try:
        return fact(me, store)
    finally:  # the first rank may have the server
        all_are_here(me, f"done with {folder}")


def check_store(ranks: Ranks, fact: Fact, folder: Path) -> None:
    for rank, found in enumerate(ranks.run(on_a_store, fact, str(folder))):
        assert_that(not found, "\n".join(found), rank)

"""Waits for a condition by checking it again and again."""

from __future__ import annotations

from collections.abc import Iterator

from conformance import Me


def rounds_of_messages(me: Me, limit: int) -> Iterator[int]:
    """Numbers from 0; between two of them a message goes to the store and back."""
    for number in range(limit):
        yield number
        me.store.add("a message to the store and back", 1)

"""Lets the ranks of a case wait for each other through the store, without collectives."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

# Nothing is judged by this time: a rank that leaves too early nearly always does it within it, and
# where none does, it is what the case costs.
_LOOK = timedelta(milliseconds=40)


def tick(store: dist.Store, event: str, of: int) -> None:
    """One of so many ranks has got there."""
    if store.add(f"{event} count", 1) == of:
        store.set(f"{event} all", "")


def wait_for_ticks(store: dist.Store, event: str) -> None:
    """Return when all of them have."""
    store.wait([f"{event} all"])


def appears(store: dist.Store, key: str, at_least: timedelta = _LOOK) -> bool:
    """Whether the key comes into the store within a short while, or a longer one."""
    try:
        store.wait([key], max(_LOOK, at_least))
    except dist.DistStoreError:
        return False
    return True

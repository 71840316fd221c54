"""Waiting helpers: poll with a timeout, let the device finish, meet by way of the store."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from conformance import Me
from conformance.harness import devices

PATIENCE_S = 5.0  # stands for ever: each operation takes less than a thousandth of that


def within_patience(
    done: Callable[[], bool], patience_s: float = PATIENCE_S, pause_s: float = 1e-3
) -> bool:
    """Whether it became true in good time. Sleeping lets other threads go on."""
    give_up_at = time.monotonic() + patience_s
    while not done():
        if time.monotonic() > give_up_at:
            return False
        time.sleep(pause_s)
    return True


def let_the_device_finish(me: Me) -> None:
    """On a device a wait may return earlier than the work is done; on the host nothing happens."""
    devices.synchronize(me.device.type)


def wait_until_freed(*refs: weakref.ref[Any]) -> None:
    """Collect garbage until what they referred to is gone, or patience is at an end: on a device,
    autograd's thread may keep a backward pass alive for a moment after it has returned."""

    def are_gone() -> bool:
        gc.collect()
        return all(ref() is None for ref in refs)

    within_patience(are_gone, pause_s=0.2)  # to collect takes long


def all_are_here(me: Me, where: str) -> None:
    """Wait, by the harness's own store, until each rank of the world has come to this place.

    where: a name that no other place of the case has.
    """
    me.store.set(f"rank {me.rank} is here: {where}", "")
    me.store.wait([f"rank {rank} is here: {where}" for rank in range(me.world_size)])


def rounds_of_messages(me: Me, limit: int) -> Iterator[int]:
    """Numbers from 0; between two of them a message goes to the store and back."""
    for number in range(limit):
        yield number
        me.store.add("a message to the store and back", 1)

"""Measures what a group keeps of complete operations: tensors that are alive, memory in use."""

from __future__ import annotations

import ctypes
import gc
import os
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from conformance import Me, assert_that
from conformance.harness import devices

# An operation carried out on tensors of this many float32 elements; returns them all.
Operation = Callable[[int], Sequence[Tensor]]

_PAST = 100
_KEPT_MAX = 10  # a group may hold on to the last ones, and handle them when the next one comes
_MANY = 64
_LARGE = 1 << 18  # elements: 1 MiB
_GROWTH_MAX = 0.5 * _MANY * _LARGE * 4
_PATIENCE_S = 10.0


@dataclass(frozen=True, slots=True)
class Kept:
    """What remains some time after operations were complete and all their handles dropped.

    operations: of a hundred, how many have a tensor that is still there.
    growth: bytes that the process has more than before 64 further ones of 1 MiB.
    """

    operations: int
    growth: int


def kept_after(me: Me, operation: Operation) -> Kept:
    """Carry it out many times. The group is warm when growth begins to count."""
    past = [[weakref.ref(x) for x in operation(4)] for _ in range(_PAST)]

    def remembered() -> int:
        gc.collect()
        return sum(any(tensor() is not None for tensor in tensors) for tensors in past)

    operations = _settled(remembered, _KEPT_MAX)
    for _ in range(_MANY // 3):
        operation(_LARGE)
    before = in_use(me.device)
    for _ in range(_MANY):
        operation(_LARGE)
    growth = _settled(lambda: in_use(me.device) - before, int(_GROWTH_MAX))
    return Kept(operations, growth)


def assert_nothing_kept(kept: Sequence[Kept]) -> None:
    """On no rank do tensors outlive their operations, and nowhere does memory grow with them."""
    for rank, mine in enumerate(kept):
        assert_that(
            mine.operations <= _KEPT_MAX,
            f"rank {rank} still has tensors of {mine.operations} of {_PAST} operations that are "
            f"over; it may have those of the last {_KEPT_MAX}",
            rank,
        )
        assert_that(
            mine.growth <= _GROWTH_MAX,
            f"rank {rank} has {mine.growth / 2**20:.0f} MiB more after {_MANY} operations of "
            f"1 MiB that are over; it may have {_GROWTH_MAX / 2**20:.0f} MiB more",
            rank,
        )


def _settled(measure: Callable[[], int], enough: int) -> int:
    """What it comes to: threads of the group may still be letting go."""
    give_up_at = time.monotonic() + _PATIENCE_S
    pause_s = 0.01
    while (seen := measure()) > enough and time.monotonic() < give_up_at:
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 1.0)  # to measure takes long
    return seen


def in_use(device: torch.device) -> int:
    """Bytes of the device that tensors have; of the process, on the CPU.

    There, what the C library keeps of freed memory for later is given back first. It would hide as
    much of what is kept.
    """
    of_device = devices.memory_allocated(device)
    if of_device is not None:
        return of_device
    give_back = getattr(ctypes.CDLL(None), "malloc_trim", None)  # not every C library has it
    if give_back is not None:
        give_back(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")

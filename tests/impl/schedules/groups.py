"""Runs the schedules of all ranks of a group in one process, in place or not; input arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from impl.schedules.steps import Schedule
from impl.testing.mailbox import RankBuffers, run_on_all_ranks

Array = npt.NDArray[Any]
WORLDS = (*range(1, 18), 23, 31, 32)
EMPTY = np.empty(0, np.float32)


def contributions(world_size: int, numel: int, seed: int = 1) -> list[Array]:
    """One float32 array a rank, of mixed sign and size: the order of summation shows."""
    random = np.random.default_rng(seed)
    return [
        (random.standard_normal(numel) * 10.0 ** random.integers(-3, 4, numel)).astype(np.float32)
        for _ in range(world_size)
    ]


def run_in_place(
    plans: Sequence[Schedule],
    outputs: Sequence[Array],
    seed: int = 0,
    combine: Callable[[Array, Array], Array] = np.add,
) -> list[Array]:
    """The outputs afterwards. The arguments stay as they are."""
    buffers = [RankBuffers(output=each.copy(), input=EMPTY) for each in outputs]
    run_on_all_ranks(plans, buffers, seed=seed, combine=combine)
    return [each.output for each in buffers]


def run_out_of_place(
    plans: Sequence[Schedule],
    inputs: Sequence[Array],
    output_numels: Sequence[int],
    seed: int = 0,
    combine: Callable[[Array, Array], Array] = np.add,
) -> list[Array]:
    """The outputs, of these sizes, which start as rubbish. Checks that no input has changed."""
    buffers = [
        RankBuffers(output=rubbish(numel, each.dtype), input=each.copy())
        for each, numel in zip(inputs, output_numels, strict=True)
    ]
    run_on_all_ranks(plans, buffers, seed=seed, combine=combine)
    for before, after in zip(inputs, buffers, strict=True):
        np.testing.assert_array_equal(before, after.input)
    return [each.output for each in buffers]


def rubbish(numel: int, dtype: np.dtype[Any]) -> Array:
    return np.full(numel * dtype.itemsize, 0xA5, np.uint8).view(dtype)


def same_bits(arrays: Sequence[Array]) -> bool:
    return len({each.tobytes() for each in arrays}) == 1

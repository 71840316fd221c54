"""Tensors of one call that overlap in memory: duplicates, errors for outputs, copies of inputs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torch import Tensor

from impl.transport.memory import overlap


def first_uses(tensors: Sequence[Tensor]) -> list[bool]:
    """For each tensor, whether no earlier one is made of the same elements of memory."""
    uses = [(tensor.data_ptr(), tensor.stride(), tensor.shape) for tensor in tensors]
    firsts = {use: index for index, use in reversed(list(enumerate(uses)))}
    return [firsts[use] == index for index, use in enumerate(uses)]


def distinct(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors without repetitions of earlier ones."""
    if len(tensors) <= 1:
        return list(tensors)
    return list(itertools.compress(tensors, first_uses(tensors)))


def check_writable(operation: str, tensors: Sequence[Tensor]) -> None:
    """Refuse outputs whose elements share memory with each other or with another output's.

    Torch's gloo accepts some of them and leaves wrong data. Raises RuntimeError.
    """
    if len(tensors) == 1 and tensors[0].is_contiguous():
        return
    intervals: list[tuple[int, int, int]] = []
    starts: set[tuple[int, tuple[int, ...]]] = set()
    for index, tensor in enumerate(tensors):
        if tensor.numel() == 0:
            continue
        start = tensor.data_ptr()
        if tensor.is_contiguous():
            intervals.append((start, start + tensor.nbytes, index))
        elif _repeats_elements(tensor):
            raise RuntimeError(
                f"{operation}: unsupported operation: more than one element of the written-to "
                f"tensor {index} refers to a single memory location. Clone it first."
            )
        # interleaved outputs, such as the columns of one matrix, are fine; equal ones are not
        if len(tensors) > 1 and (start, tensor.stride()) in starts:
            raise _aliased(operation, index)
        starts.add((start, tensor.stride()))
    intervals.sort()
    for (_, stop, _), (start, _, index) in itertools.pairwise(intervals):
        if start < stop:
            raise _aliased(operation, index)


def without_overlap(
    source: Tensor, rooms: Sequence[Tensor], own: Tensor | None = None, gap_nbytes: int = 0
) -> Tensor:
    """`source`, or a copy of it if it overlaps one of the output buffers `rooms`.

    What a rank gives to itself may stay where it is: the buffer `own` does no harm if it begins
    exactly `gap_nbytes` behind the source.
    """
    for room in rooms:
        if overlap(source, room) and not (
            room is own and room.data_ptr() - source.data_ptr() == gap_nbytes
        ):
            return source.clone()
    return source


def _aliased(operation: str, index: int) -> RuntimeError:
    return RuntimeError(
        f"{operation}: output tensor {index} shares memory with another output tensor; each rank's "
        f"result needs memory of its own."
    )


def _repeats_elements(tensor: Tensor) -> bool:
    """Whether two indices lead to one element. Exact for slices; `as_strided` may be refused."""
    extents = sorted(
        (stride, size)
        for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
        if size > 1
    )
    reach = 0
    for stride, size in extents:
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False

"""Makes flat memory of a caller's tensor, which a communicator can use, and copies results back.

[Note: raw memory] Torch's own gloo writes to the tensors' memory behind autograd's back: no
gradient is recorded, and no version counter moves. Programs rely on it (FSDP refills a parameter's
storage between forward and backward), so tensors are taken as `.data` here, which shares memory and
nothing else.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from impl.transport.memory import overlap


def flat(tensor: Tensor) -> Tensor:
    """(numel,): the tensor's memory if that is contiguous, otherwise a contiguous copy.

    Complex numbers become pairs of reals, (2 * numel,).
    """
    raw = tensor.data
    if raw.is_complex():
        raw = torch.view_as_real(raw.resolve_conj().resolve_neg())
    elif raw.is_neg():
        raw = raw.resolve_neg()
    raw = raw.contiguous()
    return raw if raw.dim() == 1 else raw.view(-1)


def flat_shares_memory(tensor: Tensor) -> bool:
    """Whether `flat` returns the tensor's own memory, so that results need no copying back."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def memory_holds_elements(tensor: Tensor) -> bool:
    """Whether a contiguous tensor's memory holds its elements, and may be written to."""
    return not (tensor.is_complex() or tensor.is_neg() or tensor.is_inference())


def room_for(tensor: Tensor) -> Tensor:
    """Memory in which results for `tensor` may be received: its own or new. See `put_back`."""
    if flat_shares_memory(tensor):
        return flat(tensor)
    numel = tensor.numel() * (2 if tensor.is_complex() else 1)
    dtype = tensor.dtype.to_real() if tensor.is_complex() else tensor.dtype
    return torch.empty(numel, dtype=dtype, device=tensor.device)


def put_back(memory: Tensor, tensor: Tensor) -> None:
    """After `flat` or `room_for`: copy `memory` to `tensor`, unless they are the same."""
    if flat_shares_memory(tensor):
        return
    if tensor.is_complex():
        tensor.data.copy_(torch.view_as_complex(memory.view(*tensor.shape, 2)))
    else:
        tensor.data.copy_(memory.view(tensor.shape))


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
    """The flat source, or a copy if a result that is written to one of the rooms could change it.

    What a rank gives to itself may stay where it is: the room `own` does no harm if it begins
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

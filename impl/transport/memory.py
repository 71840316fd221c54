"""Buffers of a schedule, made of tensors: views as bytes or elements, staging, scratch memory."""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from impl.schedules.arithmetic import ceil_div
from impl.schedules.steps import Region, Schedule
from impl.transport.base import Combine
from impl.transport.lent import Lent, MemoryGone, check, is_there

NO_BYTES = memoryview(bytearray())


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor of any dtype, writable, without a copy.

    By address: `Tensor.numpy` does not know every dtype (bfloat16, float8), and reinterpreting the
    tensor first costs three times as much. The view keeps the tensor's storage alive, but cannot
    keep its memory if that is resized: see `lent.py`. Raises MemoryGone if that has happened.
    """
    nbytes = tensor.numel() * tensor.element_size()
    if nbytes == 0:
        return NO_BYTES
    memory: Any = (ctypes.c_char * nbytes).from_address(tensor.data_ptr())
    memory.lent = Lent(tensor)
    return memoryview(memory).cast("B")


def overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two contiguous tensors share memory."""
    a_start, b_start = a.data_ptr(), b.data_ptr()
    return a_start < b_start + b.nbytes and b_start < a_start + a.nbytes


def _new_elements(nbytes: int, dtype: torch.dtype) -> Tensor:
    """Uninitialised memory for `nbytes` bytes: (ceil(nbytes / itemsize),).

    It may outlive the call that needs it first, so that call's inference mode and default device
    must not stick to it.
    """
    with torch.inference_mode(False):
        return torch.empty(ceil_div(nbytes, dtype.itemsize), dtype=dtype, device="cpu")


@dataclass(slots=True)
class _Space:
    """One buffer: the bytes of one or more tensors, as if they were contiguous."""

    tensors: list[Tensor]
    views: list[memoryview]
    starts: list[int]

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> _Space:
        # Tensors without elements have no place of their own: an offset must name one tensor.
        kept = [tensor for tensor in tensors if tensor.numel()]
        views = [bytes_of(tensor) for tensor in kept]
        starts, end = [], 0
        for view in views:
            starts.append(end)
            end += len(view)
        return cls(kept, views, starts)

    def locate(self, region: Region) -> tuple[int, int]:
        """Which tensor holds the region, and the offset in it, in bytes."""
        if len(self.starts) == 1:
            return 0, region.start
        index = bisect_right(self.starts, region.start) - 1
        return index, region.start - self.starts[index]

    def present(self, index: int) -> memoryview:
        """The bytes of one tensor. Raises MemoryGone if they are gone."""
        view = self.views[index]
        if not is_there(view):
            raise MemoryGone
        return view


class TensorMemory:
    """One rank's buffers during one collective, for the executor.

    `output` and `input` may be spread over several tensors of one dtype. Regions do not cross from
    one tensor to the next.
    """

    __slots__ = ("_combine", "_itemsize", "_spaces")

    def __init__(
        self,
        output: Sequence[Tensor],
        input: Sequence[Tensor],
        scratch: Tensor,
        combine: Combine | None = None,
    ) -> None:
        self._spaces = (_Space.of(input), _Space.of(output), _Space.of([scratch]))
        self._itemsize = scratch.element_size()
        self._combine = combine

    def view(self, region: Region) -> memoryview:
        if region.nbytes == 0:
            return NO_BYTES
        space = self._spaces[region.buffer]
        index, offset = space.locate(region)
        return space.present(index)[offset : offset + region.nbytes]

    def _elements(self, region: Region) -> Tensor:
        space = self._spaces[region.buffer]
        index, offset = space.locate(region)
        tensor = space.tensors[index]
        if region.nbytes == len(space.present(index)):
            return tensor
        start = offset // self._itemsize
        return tensor[start : start + region.nbytes // self._itemsize]

    def combine(self, into: Region, other: Region) -> None:
        assert self._combine is not None
        self._combine(self._elements(into), self._elements(other))

    def fold(self, into: Region, parts: Sequence[Region]) -> None:
        assert self._combine is not None
        self._combine.fold(self._elements(into), [self._elements(part) for part in parts])

    def copy(self, into: Region, source: Region) -> None:
        self.view(into)[:] = self.view(source)


class StagingBuffers(TensorMemory):
    """Buffers for one small schedule, which are reused for every call.

    A program repeats the same few small collectives. Making views and slices for them anew would
    take longer than everything else on this side of the network, so they are kept.
    """

    __slots__ = ("_elements_of", "_input_address", "_output_address", "_views", "plan")

    def __init__(
        self, plan: Schedule, dtype: torch.dtype, output_nbytes: int, input_nbytes: int
    ) -> None:
        self.plan = plan
        output, given, scratch = (
            _new_elements(nbytes, dtype)
            for nbytes in (output_nbytes, input_nbytes, plan.scratch_nbytes)
        )
        super().__init__([output], [given], scratch)
        self._output_address = output.data_ptr()
        self._input_address = given.data_ptr()
        self._views: dict[Region, memoryview] = {}
        self._elements_of: dict[Region, Tensor] = {}

    def view(self, region: Region) -> memoryview:
        view = self._views.get(region)
        if view is None:
            view = self._views[region] = super().view(region)
        return view

    def _elements(self, region: Region) -> Tensor:
        tensor = self._elements_of.get(region)
        if tensor is None:
            tensor = self._elements_of[region] = super()._elements(region)
        return tensor

    def lay_out(
        self, output: Sequence[Tensor], input: Sequence[Tensor], combine: Combine | None
    ) -> None:
        """Fill OUTPUT and INPUT with the contents of these tensors, one behind the other."""
        self._combine = combine
        _copy_memory(self._output_address, output, to_tensors=False)
        _copy_memory(self._input_address, input, to_tensors=False)

    def hand_over(self, output: Sequence[Tensor]) -> None:
        """Copy OUTPUT to these tensors, which together hold as many bytes."""
        _copy_memory(self._output_address, output, to_tensors=True)


def _copy_memory(address: int, tensors: Sequence[Tensor], to_tensors: bool) -> None:
    for tensor in tensors:
        nbytes = tensor.numel() * tensor.element_size()
        check(tensor)
        if to_tensors:
            ctypes.memmove(tensor.data_ptr(), address, nbytes)
        else:
            ctypes.memmove(address, tensor.data_ptr(), nbytes)
        address += nbytes


_Key = tuple[int, torch.dtype, int, int]  # id of the plan, and what the buffers are made for


class StagingCache:
    """The buffers that were used last."""

    def __init__(self, count_max: int = 16) -> None:
        self._staging: OrderedDict[_Key, StagingBuffers] = OrderedDict()
        self._count_max = count_max

    def take(
        self, plan: Schedule, dtype: torch.dtype, output_nbytes: int, input_nbytes: int
    ) -> StagingBuffers:
        """Buffers for this schedule. They keep their plan alive, so the plan's id is its own."""
        key = (id(plan), dtype, output_nbytes, input_nbytes)
        staged = self._staging.get(key)
        if staged is None:
            staged = self._staging[key] = StagingBuffers(plan, dtype, output_nbytes, input_nbytes)
            if len(self._staging) > self._count_max:
                self._staging.popitem(last=False)
        else:
            self._staging.move_to_end(key)
        return staged


class ScratchPool:
    """Working memory that is kept from one collective to the next, as long as it is small."""

    KEPT_NBYTES_MAX = 4 << 20

    def __init__(self) -> None:
        self._kept = _new_elements(0, torch.uint8)

    def take(self, nbytes: int, dtype: torch.dtype) -> Tensor:
        """At least `nbytes` as a flat tensor, undefined. Valid until the next call."""
        if nbytes > self.KEPT_NBYTES_MAX:
            return _new_elements(nbytes, dtype)
        if self._kept.numel() < nbytes:
            # Powers of two, so that growing sizes do not allocate each time.
            rounded_up = max(4096, 1 << (nbytes - 1).bit_length())
            self._kept = _new_elements(rounded_up, torch.uint8)
        return self._kept.view(dtype)

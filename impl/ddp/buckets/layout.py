"""Layout of a bucket's flat buffer: offset and strides of each gradient, and the views of them.

A bucket is one flat buffer. Each gradient owns a slot of it, and is seen through a view whose
strides are those that autograd gives to the gradient itself (the *gradient layout contract*,
torch's accumulate_grad.h): the parameter's own strides if it is dense and does not overlap itself,
row-major otherwise. Then copies in and out are plain memory copies, and a gradient may be the view
itself.

    parameter (2, 3), strides (1, 2)     buffer  | p00 p10 p01 p11 p02 p12 | next slot ...
    parameter (2, 3), strides (0, 1)     buffer  | p00 p01 p02 p10 p11 p12 | next slot ...

A complex bucket's buffer holds real numbers, twice as many: backends reduce real numbers, and hooks
meet a real buffer, as in torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_REAL_OF = {
    torch.complex32: torch.float16,
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
}


@dataclass(frozen=True)
class GradientSlot:
    """One gradient's place, counted in elements of the parameter's dtype."""

    offset: int
    numel: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True)
class BucketLayout:
    """How the gradients of one bucket share its buffer."""

    slots: tuple[GradientSlot, ...]
    numel: int  # of gradients, in the parameters' dtype
    dtype: torch.dtype  # of the parameters
    device: torch.device

    @property
    def is_complex(self) -> bool:
        return self.dtype.is_complex

    @property
    def buffer_dtype(self) -> torch.dtype:
        return _REAL_OF.get(self.dtype, self.dtype)

    @property
    def buffer_numel(self) -> int:
        return 2 * self.numel if self.is_complex else self.numel


def is_non_overlapping_and_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether the elements fill a block of memory exactly once, in some order of the dimensions.

    Semantics: torch's `TensorImpl::compute_non_overlapping_and_dense`.
    """
    needed_stride = 1
    for size, stride in sorted(
        ((n, s) for n, s in zip(shape, strides, strict=True) if n != 1), key=lambda pair: pair[1]
    ):
        if size == 0:
            return True
        if stride != needed_stride:
            return False
        needed_stride *= size
    return True


def row_major_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor of `shape`."""
    strides = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def gradient_strides(param: Tensor) -> tuple[int, ...]:
    """The strides that autograd gives to the gradient of `param`."""
    if is_non_overlapping_and_dense(param.shape, param.stride()):
        return param.stride()
    return row_major_strides(param.shape)


def lay_out(params: Sequence[Tensor]) -> BucketLayout:
    """Lay the gradients of `params` end to end.

    Raises:
        RuntimeError: the parameters differ in device or dtype.
    """
    first = params[0]
    slots = []
    offset = 0
    for param in params:
        if param.device != first.device:
            raise RuntimeError("All parameters in a bucket must be placed on the same device.")
        if param.dtype != first.dtype:
            raise RuntimeError("All parameters in a bucket must have the same dtype.")
        slots.append(
            GradientSlot(offset, param.numel(), tuple(param.shape), gradient_strides(param))
        )
        offset += param.numel()
    return BucketLayout(tuple(slots), offset, first.dtype, first.device)


def view_gradients(buffer: Tensor, layout: BucketLayout) -> list[Tensor]:
    """Views of `buffer`, one per gradient, each with its slot's shape and strides.

    `buffer` holds the bucket's elements in order, in any dtype; it need not be the bucket's own
    buffer, start at its storage's beginning, nor be one-dimensional. If it is not contiguous, the
    views are of a copy.

    Raises:
        RuntimeError: `buffer` has not exactly the bucket's number of elements.
    """
    if buffer.numel() != layout.buffer_numel:
        raise RuntimeError(
            f"A gradient bucket holds {layout.buffer_numel} elements of {layout.buffer_dtype}, "
            f"but the tensor that stands for it has shape {tuple(buffer.shape)}."
        )
    flat = buffer.reshape(-1).contiguous()
    if layout.is_complex:
        flat = torch.view_as_complex(flat.reshape(-1, 2))
    start = flat.storage_offset()
    return [flat.as_strided(slot.shape, slot.strides, start + slot.offset) for slot in layout.slots]

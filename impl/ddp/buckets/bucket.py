"""The reducer's `Bucket` of gradients, and the `GradBucket` that communication hooks receive."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from impl.ddp.buckets.layout import BucketLayout, lay_out, view_gradients
from impl.device import DeviceHandle

# From this size on, a gradient is copied into its bucket as soon as it is there, scaled on the
# way: it is still in the cache, and the memory that autograd gave it is freed at once. Smaller
# ones wait for each other and are copied by one call: below, that call's overhead outweighs the
# memory traffic. Measured on CPU, copying and scaling 8 gradients: 17 us one by one and 6 us
# together for 4 KiB each, 27 and 24 us for 64 KiB, 160 and 200 us for 256 KiB.
COPY_AT_ONCE_FROM_BYTES = 128 * 1024


def is_large(param: Tensor) -> bool:
    """Whether the gradient of `param` is copied without waiting for others."""
    return param.numel() * param.element_size() >= COPY_AT_ONCE_FROM_BYTES


@dataclass(frozen=True)
class GradientSlots:
    """Gradients of a bucket that are copied together.

    Parameters are never given `views` themselves: code that gives a gradient other memory
    (`grad.data = ...`, as `Module.to(memory_format=...)` does) would take them out of the bucket.
    """

    params: list[Tensor]
    views: list[Tensor]  # of the bucket's buffer, one per parameter
    strides: list[tuple[int, ...]]  # of the views
    addresses: list[int]  # of the views
    whole: Tensor | None  # the buffer, if these are all its slots
    _lent: list[Tensor] = field(default_factory=list)  # other tensors on the same memory

    @classmethod
    def of(
        cls, params: Sequence[Tensor], views: Sequence[Tensor], whole: Tensor | None
    ) -> GradientSlots:
        strides = [view.stride() for view in views]
        return cls(list(params), list(views), strides, [view.data_ptr() for view in views], whole)

    def hold(self, grads: Sequence[Any]) -> bool:
        """Whether these gradients, one per parameter, are all there, and in the views' memory."""
        try:
            return [grad.data_ptr() for grad in grads] == self.addresses
        except AttributeError:
            return False  # some are None

    def lend(self) -> list[Tensor]:
        """The views, for parameters to have as gradients."""
        if not self._lent or not self.hold(self._lent):
            self._lent[:] = [view.detach() for view in self.views]
        return self._lent


@dataclass
class Bucket:
    """Gradients that are reduced together. A sparse bucket has no buffer of its own."""

    index: int
    param_indices: tuple[int, ...]
    params: list[Tensor]
    device: DeviceHandle  # of the parameters
    layout: BucketLayout | None = None  # None if sparse
    buffer: Tensor | None = None  # (layout.buffer_numel,); if sparse, this iteration's gradient
    all_slots: GradientSlots | None = None
    small_slots: GradientSlots | None = None  # those that wait for each other
    sparse_rows: Tensor | None = None  # (rows,) of this iteration's sparse metadata
    skipped: bool = False  # in this backward pass: not reduced, and what is in it stays as it is
    future: Any = None  # torch.futures.Future of the reduction; None if it was skipped
    streams: set[Any] = field(default_factory=set)  # of its device, that it must come after

    @property
    def sparse(self) -> bool:
        return self.layout is None

    @property
    def views(self) -> list[Tensor]:
        """Views of the buffer, one per parameter; none if the bucket is sparse."""
        return [] if self.all_slots is None else self.all_slots.views

    @property
    def nbytes(self) -> int:
        return sum(param.numel() * param.element_size() for param in self.params)


class GradBucket:
    """A bucket of gradients, as a communication hook sees it.

    The interface is that of `torch.distributed.GradBucket`, so hooks written for it work unchanged.
    The gradients are not divided by the world size: with a hook, scaling is the hook's business.
    """

    __slots__ = (
        "_bucket_count",
        "_buffer",
        "_gradients_in_memory_order",
        "_index",
        "_layout",
        "_params",
        "_sparse_rows",
    )

    def __init__(
        self,
        index: int,
        bucket_count: int,
        buffer: Tensor,
        parameters: Sequence[Tensor],
        layout: BucketLayout | None = None,
        *,
        sparse_rows: Tensor | None = None,
        gradients_in_memory_order: bool = False,
    ) -> None:
        """
        Args:
            index: the bucket's place in the order of reduction.
            bucket_count: of the whole model.
            buffer: (elements,) all gradients end to end, real even for complex parameters; or one
                sparse gradient.
            parameters: whose gradients these are, in the same order.
            layout: where each gradient lies in `buffer`; by default `parameters` end to end.
            sparse_rows: (rows,) the rows that `buffer` may have values for, if every rank knows
                them beforehand.
            gradients_in_memory_order: see `gradients`.
        """
        self._index = index
        self._bucket_count = bucket_count
        self._buffer = buffer
        self._params = list(parameters)
        self._layout = layout
        self._sparse_rows = sparse_rows
        self._gradients_in_memory_order = gradients_in_memory_order

    def index(self) -> int:
        """The bucket's place in the order of reduction. Buckets are rebuilt after one iteration."""
        return self._index

    def buffer(self) -> Tensor:
        """All gradients of the bucket end to end, one-dimensional; or its one sparse gradient."""
        return self._buffer

    def set_buffer(self, buffer: Tensor) -> None:
        """Put `buffer` in place of the bucket's buffer, for instance one of another dtype."""
        self._buffer = buffer

    def gradients(self) -> list[Tensor]:
        """Views of the buffer, one per parameter, element by element those of its gradient.

        Unlike torch 2.13's, they keep their meaning for parameters that are not row-major (a
        channels_last convolution) and for complex ones, whose buffer is real.

        A hook that only rearranges memory (PowerSGD views each gradient as a matrix) is given
        row-major views of each gradient's memory instead, as torch gives them.
        """
        if self._buffer.is_sparse:
            return [self._buffer]
        layout = self._layout or lay_out(self._params)
        if self._gradients_in_memory_order:
            flat = self._buffer.reshape(-1)
            flat = torch.view_as_complex(flat.view(-1, 2)) if layout.is_complex else flat
            return [
                flat[slot.offset : slot.offset + slot.numel].view(slot.shape)
                for slot in layout.slots
            ]
        return view_gradients(self._buffer, layout)

    def parameters(self) -> list[Tensor]:
        """The parameters, in the order of `gradients()`."""
        return list(self._params)

    def is_last(self) -> bool:
        """Whether this is the last bucket to be reduced: the first layers of the forward pass."""
        return self._index == self._bucket_count - 1

    def sparse_rows(self) -> Tensor | None:
        """The rows that every rank knows to be touched, if sparse metadata was set."""
        return self._sparse_rows

    def __repr__(self) -> str:
        return (
            f"GradBucket({self._index} of {self._bucket_count}, {len(self._params)} gradients, "
            f"{self._buffer.numel()} x {self._buffer.dtype})"
        )

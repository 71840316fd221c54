"""Memory of tensors that an operation uses, and whether it is still there.

[Note: freed memory] A program may free or move a tensor's memory while an operation uses it
(`x.untyped_storage().resize_(0)`, as FSDP does all the time, here too early). Nothing can keep that
memory: torch has no second owner for it. So every copy first looks whether the storage still lies
where it lay when the operation began; if not, the operation fails, and says so. A receive fails
alone, and its bytes are thrown away. What was promised to others, a send or a part of a collective,
cannot be kept: the group ends. What cannot be seen is memory that goes while a copy is under way.
"""

from __future__ import annotations

from torch import Tensor

from impl.errors import Aborted, describe_call
from impl.transport.base import CallInfo


class MemoryGone(Exception):
    """The memory of a tensor has been freed or moved while an operation used it."""

    def __init__(self) -> None:
        super().__init__("the storage of its tensor was resized before the operation had ended")


def aborted(gone: MemoryGone, call: CallInfo, group: str, rank: int, world_size: int) -> Aborted:
    """The error of an operation that fails for this reason."""
    where = describe_call(call.operation, call.sequence, group)
    return Aborted(f"{where}, rank {rank} of {world_size}: {gone}.")


class Lent:
    """The memory of a contiguous CPU tensor with elements, which an operation uses."""

    __slots__ = ("_address", "_is_gone", "_stop", "_storage")

    def __init__(self, tensor: Tensor) -> None:
        """Raises MemoryGone if it is not there."""
        storage = self._storage = tensor.untyped_storage()
        self._address: int = storage.data_ptr()
        self._stop: int = tensor.data_ptr() + tensor.nbytes - self._address
        self._is_gone = False
        self.check()

    def is_there(self) -> bool:
        """Whether it always was, each time that this was asked."""
        storage = self._storage
        if storage.data_ptr() != self._address or storage.nbytes() < self._stop:
            self._is_gone = True
        return not self._is_gone

    def check(self) -> None:
        """Raises MemoryGone unless it is there."""
        if not self.is_there():
            raise MemoryGone


def check(tensor: Tensor) -> None:
    """Raises MemoryGone unless the storage of a CPU tensor, of any strides, holds all elements."""
    if tensor.numel():
        reach = sum(
            (n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True)
        )
        stop = (tensor.storage_offset() + reach + 1) * tensor.element_size()
        if tensor.untyped_storage().nbytes() < stop:
            raise MemoryGone


def is_there(view: memoryview) -> bool:
    """Whether the memory under a view is: always, except that of a tensor (`bytes_of`)."""
    lent = getattr(view.obj, "lent", None)
    return lent is None or lent.is_there()


def copy_of(view: memoryview) -> memoryview:
    """What the view shows, in memory of its own; the view itself if its memory is gone."""
    return memoryview(bytes(view)) if is_there(view) else view

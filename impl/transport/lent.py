"""Memory of tensors that an operation uses, and whether it is still there.

[Note: freed memory] A program may free or move a tensor's memory while an operation uses it
(`x.untyped_storage().resize_(0)`, as FSDP does all the time, here too early). Nothing can keep that
memory: torch has no second owner for it. So every copy first looks whether the storage still lies
where it lay when the operation began; if not, the operation fails, and says so. A receive fails
alone, and its bytes are thrown away. What was promised to others, a send or a part of a collective,
cannot be kept: the group ends. What cannot be seen is memory that goes while a copy is under way,
and a smaller storage at the very same address.
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

    __slots__ = ("_address", "_is_gone", "_tensor")

    def __init__(self, tensor: Tensor) -> None:
        """Raises MemoryGone if it is not there."""
        self._tensor = tensor  # keeps the storage alive
        self._address = address_of(tensor)
        self._is_gone = False

    def is_there(self) -> bool:
        """Whether it always was, each time that this was asked."""
        if self._tensor.data_ptr() != self._address:
            self._is_gone = True
        return not self._is_gone

    def check(self) -> None:
        """Raises MemoryGone unless it is there."""
        if not self.is_there():
            raise MemoryGone


def address_of(tensor: Tensor) -> int:
    """Where the elements of a tensor lie that has some. Raises MemoryGone if its storage has no
    memory."""
    address: int = tensor.data_ptr()
    # It is then what lies before its elements. To ask the storage takes many times longer.
    if address == tensor.storage_offset() * tensor.element_size():
        raise MemoryGone
    return address


def check(tensor: Tensor) -> None:
    """Raises MemoryGone if the storage of a tensor with elements has no memory."""
    if tensor.numel():
        address_of(tensor)


def fill(target: Tensor, source: Tensor) -> None:
    """Copy, unless memory of either is gone: torch does not look. Raises MemoryGone."""
    check(target)
    check(source)
    target.copy_(source)


def is_there(view: memoryview) -> bool:
    """Whether the memory under a view is: always, except that of a tensor (`bytes_of`)."""
    lent = getattr(view.obj, "lent", None)
    return lent is None or lent.is_there()


def copy_of(view: memoryview) -> memoryview:
    """What the view shows, in memory of its own; the view itself if its memory is gone."""
    return memoryview(bytes(view)) if is_there(view) else view

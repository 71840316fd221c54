"""Staging of CPU tensors for one operation (`Lender`), and the base class of CUDA staging.

A `Lender` takes the caller's tensors, lends flat contiguous CPU memory for each, and brings results
back. For contiguous CPU tensors the memory is their own.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from impl.gloo.memory import dense
from impl.transport import lent
from impl.transport.base import Pace


class Lender:
    """Lends memory for the tensors of one operation; this class for tensors on the CPU.

    `read`, `room` and `update` are called when the operation is issued, `prepare` when it starts
    and `give_back` when it has succeeded, perhaps on another thread. `run` does the latter two, and
    `conclude` the last one where nothing had to be prepared, around what has to be around them.
    """

    has_streams = False  # whether results arrive on a stream, after the operation is done

    def __init__(self) -> None:
        self._owed: list[tuple[Tensor, Tensor]] = []  # memory, tensor
        self._lent: list[Tensor] = []  # of tensors on the CPU
        self.needs_inference_mode = False

    def read(self, tensor: Tensor) -> Tensor:
        """(numel,): what the tensor holds now."""
        return self._lend(dense.flat(tensor))

    def room(self, tensor: Tensor) -> Tensor:
        """(numel,): for a result that replaces the tensor's contents."""
        return self._owe(dense.room_for(tensor), tensor)

    def update(self, tensor: Tensor) -> Tensor:
        """(numel,): the tensor's contents, to be replaced by a result."""
        return self._owe(dense.flat(tensor), tensor)

    def expect_write(self, tensor: Tensor) -> None:
        """The operation will write to this tensor."""
        # torch lets only inference mode write to the tensors that it made; the lent memory is one
        # of them if the operation was issued there
        if tensor.is_inference():
            self.needs_inference_mode = True

    def _owe(self, memory: Tensor, tensor: Tensor) -> Tensor:
        self.expect_write(tensor)
        self.expect_write(memory)
        self._lend(memory)
        if not dense.flat_shares_memory(tensor):
            self._owed.append((memory, tensor))
        return memory

    def _lend(self, memory: Tensor) -> Tensor:
        self._lent.append(memory)
        return memory

    def prepare(self) -> None:
        """Wait until the lent memory holds what was to be read."""

    def pace(self) -> Pace | None:
        """How an operation on one large tensor can overlap with copies of it; None if it cannot."""
        return None

    def on_device(self) -> AbstractContextManager[Any]:
        """A context for what runs after the results, such as a future's callbacks."""
        return nullcontext()

    def give_back(self) -> None:
        """Copy the results to the tensors."""
        for memory, tensor in self._owed:
            dense.put_back(memory, tensor)

    def give_sparse(self, result: Tensor, tensors: list[Tensor]) -> Tensor:
        """Bring a coalesced sum to all `tensors`; the sum on their device."""
        # not into `.data`: of a sparse tensor that is another one, with indices of its own
        with torch.no_grad():
            for tensor in tensors:
                tensor.copy_(result)
        return result

    def has_arrived(self) -> bool:
        """Whether the tensors hold what was given back."""
        return True

    def synchronize(self) -> None:
        """Make the caller's stream wait for the results, for tensors on a device."""

    def new_future(self) -> torch.futures.Future[Any]:
        """A future for the results."""
        return torch.futures.Future()

    def run(self, operation: Callable[[], None]) -> None:
        """Prepare, operate, give back. Raises MemoryGone if a tensor's memory is not there."""
        for memory in self._lent:
            lent.check(memory)
        with self._writing():
            self._run(operation)

    def _run(self, operation: Callable[[], None]) -> None:
        self.prepare()
        operation()
        self.give_back()

    def conclude(self) -> None:
        """Give back what another thread has received meanwhile."""
        with self._writing():
            self.give_back()

    def _writing(self) -> AbstractContextManager[Any]:
        if self.needs_inference_mode and not torch.is_inference_mode_enabled():
            return torch.inference_mode()
        return nullcontext()

"""Staging of tensors on devices without streams: plain copies on the host, each waited for."""

from __future__ import annotations

import torch
from torch import Tensor

from impl.gloo.memory import dense
from impl.gloo.memory.staging import Lender


class CopyLender(Lender):
    """Lends memory of the host for tensors on a device whose kernels run one after the other.

    The copies to the device come after what the caller put there before the call, and before what
    the caller puts there after the wait.
    """

    def read(self, tensor: Tensor) -> Tensor:
        return self._lend(dense.flat(tensor).cpu())

    def room(self, tensor: Tensor) -> Tensor:
        numel, dtype = dense.numbers_of(tensor)
        return self._owe(torch.empty(numel, dtype=dtype, device="cpu"), tensor)

    def update(self, tensor: Tensor) -> Tensor:
        return self._owe(dense.flat(tensor).cpu(), tensor)

    def _owe(self, memory: Tensor, tensor: Tensor) -> Tensor:
        self.expect_write(tensor)
        self._owed.append((self._lend(memory), tensor))
        return memory

    def give_back(self) -> None:
        for memory, tensor in self._owed:
            tensor.data.copy_(dense.shaped(memory, tensor))

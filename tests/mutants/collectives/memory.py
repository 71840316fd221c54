"""Mutants of conformance/spec/collectives/memory.py."""

from __future__ import annotations

from typing import Any

from tests.mutants.collectives.kit import Keeps
from tests.mutants.kit import ForwardingGroup, breaks


@breaks("work/keeps-nothing", says=r"rank 0 still has tensors of 100 of 100 operations")
class RemembersWhatItReduced(Keeps):
    """All tensors that were ever reduced are kept."""

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        self.kept += tensors
        return super().allreduce(tensors, opts)


@breaks("work/keeps-nothing", says=r"rank 0 has \d\d MiB more after 64 operations of 1 MiB")
class BroadcastBuffersAreNeverFreed(Keeps):
    """Each broadcast copies to memory that is never freed."""

    def broadcast(self, tensors: Any, opts: Any) -> Any:
        self.kept += [tensor.clone() for tensor in tensors]
        return super().broadcast(tensors, opts)


@breaks("work/storage-can-be-resized", says=r"resize storage that is not resizable")
class GathersFromArraysOfNumpy(ForwardingGroup):
    """numpy shares the memory of a tensor with it, which can then not be resized any more."""

    def allgather(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        for tensor in inputs:
            tensor.numpy()
        return super().allgather(outputs, inputs, opts)

"""Schedule and tensors for each collective of a `Communicator`. Nothing is sent here.

`Plans` is a family of schedules: `impl.schedules.choice` picks the quickest for a size;
`GlooPlans` are those of C++ Gloo.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from impl.schedules import choice
from impl.schedules.barrier import dissemination_barrier
from impl.schedules.logarithmic import binomial_broadcast
from impl.schedules.pairwise import direct_gather, direct_scatter, pairwise_all_to_all
from impl.schedules.ring import (
    ring_all_gather,
    ring_all_gather_v,
    ring_all_reduce,
    ring_reduce,
    ring_reduce_scatter,
)
from impl.schedules.steps import Schedule
from impl.transport.base import Combine
from impl.transport.memory import overlap
from impl.transport.messages.frames import SlotPrefix
from impl.transport.sockets.collective_run import Collective


class Plans(Protocol):
    """Schedules for the collectives for which there is more than one."""

    def all_reduce(
        self, rank: int, world_size: int, total_nbytes: int, itemsize: int
    ) -> Schedule: ...

    def reduce(
        self, rank: int, world_size: int, root: int, total_nbytes: int, itemsize: int
    ) -> Schedule: ...

    def broadcast(self, rank: int, world_size: int, root: int, total_nbytes: int) -> Schedule: ...

    def all_gather(self, rank: int, world_size: int, block_nbytes: int) -> Schedule: ...

    def all_gather_v(self, rank: int, world_size: int, block_nbytes: Sequence[int]) -> Schedule: ...

    def reduce_scatter(
        self, rank: int, world_size: int, chunk_nbytes: int, itemsize: int
    ) -> Schedule: ...


class ChosenPlans:
    """The quickest schedule for each size."""

    all_reduce = staticmethod(choice.all_reduce)
    reduce = staticmethod(choice.reduce)
    broadcast = staticmethod(choice.broadcast)
    all_gather = staticmethod(choice.all_gather)
    all_gather_v = staticmethod(choice.all_gather_v)
    reduce_scatter = staticmethod(choice.reduce_scatter)


class GlooPlans:
    """What C++ Gloo does, whatever the size. It has no reduce-scatter of its own."""

    all_reduce = staticmethod(ring_all_reduce)
    reduce = staticmethod(ring_reduce)
    broadcast = staticmethod(binomial_broadcast)
    all_gather = staticmethod(ring_all_gather)
    all_gather_v = staticmethod(ring_all_gather_v)
    reduce_scatter = staticmethod(ring_reduce_scatter)


def _around(tensor: Tensor, index: int, chunk_numel: int) -> tuple[Tensor, Tensor, Tensor]:
    """The part before chunk `index`, the chunk, and the part after it."""
    start, stop = index * chunk_numel, (index + 1) * chunk_numel
    return tensor[:start], tensor[start:stop], tensor[stop:]


class CollectiveBuilder:
    """One rank's part of each collective. Arguments as in `Communicator`."""

    def __init__(self, rank: int, world_size: int, plans: Plans) -> None:
        self._rank = rank
        self._world_size = world_size
        self._plans = plans

    def all_reduce(self, tensor: Tensor, combine: Combine) -> Collective:
        plan = self._plans.all_reduce(
            self._rank, self._world_size, tensor.nbytes, tensor.element_size()
        )
        return Collective(
            SlotPrefix.ALL_REDUCE, plan, [tensor], combine=combine, output_starts_filled=True
        )

    def reduce(self, tensor: Tensor, root: int, combine: Combine) -> Collective:
        """The schedules reduce in place on every rank: ranks other than the root lend a copy."""
        working = tensor if self._rank == root else tensor.clone()
        plan = self._plans.reduce(
            self._rank, self._world_size, root, tensor.nbytes, tensor.element_size()
        )
        return Collective(
            SlotPrefix.REDUCE, plan, [working], combine=combine, output_starts_filled=True
        )

    def broadcast(self, tensor: Tensor, root: int) -> Collective:
        plan = self._plans.broadcast(self._rank, self._world_size, root, tensor.nbytes)
        return Collective(SlotPrefix.BROADCAST, plan, [tensor], output_starts_filled=True)

    def all_gather(self, output: Tensor, input: Tensor) -> Collective:
        plan = self._plans.all_gather(self._rank, self._world_size, input.nbytes)
        return Collective(SlotPrefix.ALL_GATHER, plan, [output], [input])

    def all_gather_v(self, outputs: Sequence[Tensor], input: Tensor) -> Collective:
        blocks = [output.nbytes for output in outputs]
        plan = self._plans.all_gather_v(self._rank, self._world_size, blocks)
        return Collective(SlotPrefix.ALL_GATHER, plan, list(outputs), [input])

    def reduce_scatter(self, output: Tensor, input: Tensor, combine: Combine) -> Collective:
        plan = self._plans.reduce_scatter(
            self._rank, self._world_size, output.nbytes, output.element_size()
        )
        parts = [input]
        if overlap(output, input):
            # the schedules receive in OUTPUT before they read their own chunk of INPUT
            before, own, after = _around(input, self._rank, output.numel())
            parts = [before, own.clone(), after]
        return Collective(SlotPrefix.ALL_REDUCE, plan, [output], parts, combine)

    def all_to_all(
        self,
        output: Tensor,
        input: Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
    ) -> Collective:
        itemsize = input.element_size()
        plan = pairwise_all_to_all(
            self._rank,
            self._world_size,
            [split * itemsize for split in output_splits],
            [split * itemsize for split in input_splits],
        )
        return Collective(SlotPrefix.ALL_TO_ALL, plan, [output], [input])

    def gather(self, outputs: Sequence[Tensor] | None, input: Tensor, root: int) -> Collective:
        blocks = [each.nbytes for each in outputs or [input] * self._world_size]
        plan = direct_gather(self._rank, self._world_size, root, blocks)
        return Collective(SlotPrefix.GATHER, plan, list(outputs or ()), [input])

    def scatter(self, output: Tensor, inputs: Sequence[Tensor] | None, root: int) -> Collective:
        plan = direct_scatter(self._rank, self._world_size, root, output.nbytes)
        return Collective(SlotPrefix.SCATTER, plan, [output], list(inputs or ()))

    def barrier(self) -> Collective:
        return Collective(SlotPrefix.BARRIER, dissemination_barrier(self._rank, self._world_size))

"""Tensors in memory that the group itself allocates, as FSDP2 and DDP ask for it."""

from __future__ import annotations

from math import prod

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from conformance import Chapter, Me, Ranks, assert_that, world_sizes
from conformance.oracle.collectives import Call, before
from conformance.spec.collectives.perform import Seen, assert_taken, issue, seen_of
from conformance.spec.parameters import ops
from conformance.torch_private import allocated

chapter = Chapter("collectives", needs="feature:tensor_alloc")

SOURCE = "torch 2.13, FSDPModule.set_allocate_memory_from_process_group_for_comm"
GAP = 3  # elements before a tensor, in the memory that was allocated for it


def laid(values: Tensor, me: Me) -> Tensor:
    """A contiguous view of memory from the group, with these values."""
    group = dist.group.WORLD
    whole = allocated(group, prod(values.shape) + GAP, values.dtype, me.device)
    return whole[GAP:].view(values.shape).copy_(values)


def on_allocated_tensors(me: Me, planned: list[Call]) -> list[Seen]:
    """All ranks have such tensors in two of three calls; then some have others.

    What was given is overwritten as soon as a call is done, while other ranks may still be in it.
    """
    seen = []
    for number, call in enumerate(planned):
        buffers = before(call, me.rank, me.world_size)
        own = number % 3 < 2 or me.rank % 2 == 0
        lay = (lambda x: laid(x, me)) if own else (lambda x: x.to(me.device))
        given, taken = list(map(lay, buffers.given)), list(map(lay, buffers.taken))
        issue(call, given, taken)
        seen.append(seen_of([], taken))
        for x in (*given, *taken):
            x.zero_()
    return seen


@chapter.must(
    "tensor_alloc/collectives",
    "Collectives on tensors that the group allocates, and on views of them, give what they give on "
    "other tensors, also where only some of the ranks have such tensors.",
    source=SOURCE,
    rests_on=("all_reduce/sum", "order/large"),
)
@pytest.mark.parametrize(
    "op",
    [
        "all_reduce",
        *ops("broadcast", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single"),
    ],
)
@world_sizes(2, 3)
def test_collectives_on_allocated_tensors(ranks: Ranks, op: str) -> None:
    """Of a MiB and more, since small ones may go another way."""
    planned = [Call(op, (numel,), salt=salt) for salt, numel in enumerate([270_001] * 5 + [7])]
    got = ranks.run(on_allocated_tensors, planned)
    for index, call in enumerate(planned):
        assert_taken(call, [seen[index] for seen in got])


def allocates(me: Me) -> str:
    """What is wrong with tensors that are allocated and freed; nothing if all is well."""
    alive: dict[int, Tensor] = {}
    dtypes = (torch.float32, torch.int32, torch.int64)  # which any device has
    for number in range(60):
        dtype, numel = dtypes[number % 3], 1 + number * 137 % 5000
        x = allocated(dist.group.WORLD, numel, dtype, me.device)
        if (x.shape, x.dtype, x.device.type) != ((numel,), dtype, me.device.type):
            return f"{x.dtype} {tuple(x.shape)} on {x.device} instead of {dtype} ({numel},)"
        alive[number] = x.fill_(number)
        alive.pop(number // 3, None)
        for i, kept in alive.items():
            if not kept.eq(i).all():
                return f"tensor {i} changed when tensor {number} was written to"
    return ""


@chapter.must(
    "tensor_alloc/own-memory",
    "allocate_tensor of a group's backend gives a flat tensor of the size, dtype and device that "
    "it is asked for, in memory that no other tensor has as long as it or a view of it lives.",
    source=SOURCE,
)
@world_sizes(2)
def test_allocated_tensors(ranks: Ranks) -> None:
    for rank, wrong in enumerate(ranks.run(allocates)):
        assert_that(not wrong, f"rank {rank}: {wrong}", rank)

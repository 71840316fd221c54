"""Tensors in memory that the group itself allocates, as FSDP2 and DDP ask for it."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from conformance import Chapter, Me, Ranks, assert_that, covers, needs, world_sizes
from conformance.oracle.collectives import Call, before
from conformance.spec.collectives.perform import (
    Seen,
    all_gather_into_tensor,
    assert_taken,
    issue,
    reduce_scatter_tensor,
    seen_of,
)
from conformance.spec.parameters import ops
from conformance.torch_private import allocated

chapter = Chapter("collectives", needs="feature:tensor_alloc")

SOURCE = "torch 2.13, FSDPModule.set_allocate_memory_from_process_group_for_comm"
_NUMEL = 3 << 20  # of 12 MiB, which two and three ranks can divide
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


def overwritten_at_once(me: Me, op: str) -> list[tuple[float, float]]:
    """Least and largest number that each of ten calls gives this rank of tensors of 12 MiB.

    In call i all ranks give the number i, and write to what they gave as soon as the call is done.
    """
    n = me.world_size
    x = allocated(dist.group.WORLD, _NUMEL, torch.float32, me.device)
    y = torch.empty(_NUMEL * n, device=me.device)
    whole, part = y[:_NUMEL], y[: _NUMEL // n]
    calls: dict[str, tuple[Tensor, Callable[[], object]]] = {
        "broadcast": (x, lambda: dist.broadcast(x, 0)),
        "all_gather_into_tensor": (y, lambda: all_gather_into_tensor(y, x)),
        "reduce_scatter_tensor": (part, lambda: reduce_scatter_tensor(part, x)),
        "all_to_all_single": (whole, lambda: dist.all_to_all_single(whole, x)),
    }
    result, call = calls[op]
    found = []
    for i in range(10):
        x.fill_(i)
        dist.barrier()
        call()
        if result is not x or me.rank == 0:
            x.fill_(-1)
        found.append((result.min().item(), result.max().item()))
    return found


@covers("tensor_alloc/collectives")
@pytest.mark.parametrize(
    "op",
    ops("broadcast", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single"),
)
@world_sizes(2, 3)
@needs("op:barrier")
def test_ranks_overwrite_what_they_gave(ranks: Ranks, op: str) -> None:
    factor = float(ranks.world_size) if op == "reduce_scatter_tensor" else 1.0
    want = [(factor * i, factor * i) for i in range(10)]
    for rank, found in enumerate(ranks.run(overwritten_at_once, op)):
        if op != "broadcast" or rank:
            assert_that(found == want, f"numbers {found}", rank)


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

"""Collectives and messages on devices: values, views, sparse sums, mixed or other devices."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from conformance import (
    Chapter,
    Me,
    Ranks,
    assert_each_rank,
    assert_same_on_all_ranks,
    gpu,
    needs,
    world_sizes,
)
from conformance.capabilities import OPS
from conformance.harness import devices
from conformance.oracle.collectives import Call, before
from conformance.oracle.data import sample
from conformance.spec.accelerator.stream_work import streams_of
from conformance.spec.collectives.perform import Seen, assert_taken, issue
from conformance.spec.raising import assert_raised

NOTES = "torch 2.13 docs, distributed: 'Synchronous and asynchronous collective operations'"

chapter = Chapter("accelerator")


MOVING = [
    pytest.param(op, marks=needs(f"op:{op}"))
    for op in OPS
    if op not in ("barrier", "monitored_barrier", "send")
]
LARGE_NUMEL = (5 << 20) + 1234  # 20 MiB: several segments of whatever size, and a bit


def perform_on_device(me: Me, call: Call) -> Seen:
    streams = streams_of(me)
    values = before(call, me.rank, me.world_size)
    given = [streams.put(x) for x in values.given]
    taken = [streams.put(x) for x in values.taken]
    issue(call, given, taken)
    return Seen((), tuple(streams.get(x) for x in taken))


@chapter.must(
    "cuda/values",
    "Every collective leaves in tensors of a device what it leaves in CPU tensors.",
    source="torch 2.13 docs, distributed: backends",
)
@gpu()
@pytest.mark.parametrize("op", MOVING)
@pytest.mark.parametrize("dtype", ["float32", "int64", "bfloat16"])
@world_sizes(1, 2, 3)
def test_collectives_on_device_tensors(ranks: Ranks, op: str, dtype: str) -> None:
    call = Call(op, (4, 3), dtype)
    assert_taken(call, ranks.run(perform_on_device, call))


def reduce_views(me: Me) -> tuple[Tensor, Tensor]:
    """Every other column is summed, then transposed rows are broadcast; all of the memory."""
    streams = streams_of(me)
    whole = streams.put(sample((4, 6), "float32", me.rank))
    dist.all_reduce(whole[:, ::2])
    rows = streams.put(sample((3, 5), "float32", me.rank))
    dist.broadcast(rows.t(), 0)
    return streams.get(whole), streams.get(rows)


@chapter.must(
    "cuda/strided",
    "Tensors of a device that are views with gaps or transposed are reduced and broadcast in "
    "place; the memory between their elements stays as it is.",
    source="all_reduce/strided and broadcast/strided, on a device",
    rests_on="cuda/values",
)
@gpu()
@world_sizes(1, 2, 3)
def test_views_are_reduced_and_broadcast_in_place(ranks: Ranks) -> None:
    got = ranks.run(reduce_views)
    inputs = [sample((4, 6), "float32", rank) for rank in range(ranks.world_size)]
    total = torch.stack(inputs).sum(0)
    want = [x.clone() for x in inputs]
    for whole in want:
        whole[:, ::2] = total[:, ::2]
    assert_each_rank([whole for whole, _ in got], want, what="every other column")
    rows = [rows for _, rows in got]
    assert_same_on_all_ranks(rows, want=sample((3, 5), "float32", 0), what="broadcast")


def sum_large(me: Me, numel: int) -> tuple[float, float, float]:
    """How many elements of a sum are wrong; then its second and its last element."""
    streams = streams_of(me)
    x = streams.put((torch.arange(numel) % 1000).float() * (me.rank + 1))
    dist.all_reduce(x)
    factor = me.world_size * (me.world_size + 1) / 2
    want = streams.put((torch.arange(numel) % 1000).float() * factor)
    wrong = streams.get((x != want).sum())
    return float(wrong), float(streams.get(x[1])), float(streams.get(x[-1]))


@chapter.must(
    "cuda/large",
    "all_reduce of a device's tensor of many megabytes sums every element.",
    source="torch 2.13 docs, all_reduce",
    rests_on="cuda/values",
)
@gpu()
@world_sizes(1, 2)
def test_a_large_tensor_is_summed(ranks: Ranks) -> None:
    factor = ranks.world_size * (ranks.world_size + 1) / 2
    last = (LARGE_NUMEL - 1) % 1000 * factor
    got = ranks.run(sum_large, LARGE_NUMEL)
    assert_same_on_all_ranks(got, want=(0.0, factor, last), what="wrong, second and last element")


def sum_sparse(me: Me) -> tuple[Tensor, str]:
    """Rank r holds r + 1 at (r, 0) and at (0, 1); the sum, and the kind of its device."""
    streams = streams_of(me)
    indices = streams.put(torch.tensor([[me.rank, 0], [0, 1]]))
    values = streams.put(torch.tensor([1.0, 1.0]) * (me.rank + 1))
    x = torch.sparse_coo_tensor(indices, values, (me.world_size, 2))
    dist.all_reduce(x)
    return streams.get(x.to_dense()), x.device.type


@chapter.must(
    "cuda/sparse",
    "all_reduce of a device's sparse tensors leaves the sum in the tensor that was passed, on its "
    "device.",
    source="torch 2.13, ProcessGroupGloo.allreduce_sparse",
    needs="feature:sparse",
)
@gpu()
@world_sizes(1, 2, 3)
def test_sparse_tensors_are_summed(ranks: Ranks) -> None:
    n = ranks.world_size
    want = torch.zeros(n, 2)
    want[:, 0] = torch.arange(1.0, n + 1)
    want[0, 1] = n * (n + 1) / 2
    assert_same_on_all_ranks(ranks.run(sum_sparse), want=(want, ranks.device))


def gather_to_host(me: Me) -> None:
    """From a tensor of the device into tensors of the host."""
    x = torch.ones(3, device=me.device)
    dist.all_gather([torch.zeros(3) for _ in range(me.world_size)], x)


def sum_afterwards(me: Me) -> Tensor:
    """After a call that was refused."""
    try:
        gather_to_host(me)
    except (RuntimeError, ValueError):
        x = torch.ones(2, device=me.device)
        dist.all_reduce(x)
        return x
    return torch.zeros(0)


@chapter.must(
    "cuda/mixed-devices",
    "A call with tensors of both the host and a device raises on every rank, and the group keeps "
    "working.",
    source="observed, torch 2.13.0: 'tensors must all be on the same device'",
)
@gpu()
@world_sizes(1, 2)
def test_tensors_of_host_and_device_in_one_call(ranks: Ranks) -> None:
    assert_raised(ranks.outcomes(gather_to_host), RuntimeError, ValueError)
    got = ranks.run(sum_afterwards)
    assert_same_on_all_ranks(got, want=torch.full((2,), float(ranks.world_size)))


def by_turns(me: Me) -> list[Tensor]:
    """Sums on each of two devices, the rank's own being the current one."""
    sums = []
    for turn in range(4):
        type = me.device.type
        device = torch.device(type, (me.rank + turn) % devices.count(type))
        x = torch.full((3,), float(me.rank + turn), device=device)
        dist.all_reduce(x)
        sums.append(x * 2)
    return sums


@chapter.should(
    "cuda/other-device",
    "A rank may use tensors of a device other than its current one, also in alternation.",
    source=f"{NOTES}: an operation concerns the streams of its tensors' device",
    rests_on="cuda/values",
)
@gpu(2)
@world_sizes(1, 2)
def test_tensors_of_several_devices_by_turns(ranks: Ranks) -> None:
    n = ranks.world_size
    want = [torch.full((3,), 2.0 * (n * (n - 1) / 2 + n * turn)) for turn in range(4)]
    assert_same_on_all_ranks(ranks.run(by_turns), want=want)


def pass_on(me: Me) -> Tensor:
    """Around the ring: what a late kernel makes goes to the next rank, which doubles it."""
    streams = streams_of(me)
    right, left = (me.rank + 1) % me.world_size, (me.rank - 1) % me.world_size
    x = streams.put(torch.zeros(5))
    received = streams.put(torch.zeros(5))
    streams.delay()
    x.add_(me.rank + 1)
    works = [dist.isend(x, right), dist.irecv(received, left)]
    for work in works:
        assert work is not None
        work.wait()
    return streams.get(received * 2)


@chapter.should(
    "cuda/messages",
    "A message between tensors of devices is sent after the kernels that were put on the current "
    "stream before, and is there for the kernels that come after wait.",
    source=f"{NOTES}; torch 2.13 docs, isend and irecv",
    needs="op:send",
)
@gpu()
@world_sizes(2, 3)
def test_messages_between_devices(ranks: Ranks) -> None:
    n = ranks.world_size
    want = [torch.full((5,), 2.0 * ((rank - 1) % n + 1)) for rank in range(n)]
    assert_each_rank(ranks.run(pass_on), want, what="what was received")

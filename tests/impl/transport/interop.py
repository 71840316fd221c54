"""Runs every operation of ProcessGroupGloo in groups that mix ranks of C++ Gloo and `impl.gloo`.

A scenario runs on one rank of a group and records every tensor that it ends with. It uses nothing
but the methods that torch's process group and ours share, so it does not know on whose rank it
runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.distributed import HashStore, Store, distributed_c10d

import impl.gloo
from tests.impl.transport.ranks import run_ranks

TIMEOUT = timedelta(seconds=20)
MIB = 1 << 20
# float32 elements: empty, fewer than ranks, not divisible, and around the 1 MiB segments of the
# rings
SIZES = (0, 1, 2, 7, 1000, MIB // 4 - 1, MIB // 4, 5 * MIB // 4 + 3)
OTHER_SIZES = (0, 1, 7, 70_001)  # for operations that do not cut tensors into segments
DTYPES = (torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int32)

Group: TypeAlias = Any  # torch's class and ours have no common type that names all methods
dist: Any = distributed_c10d  # whose stubs lack half of what is needed here


@dataclass
class Scenario:
    """One rank's part. `record` keeps copies of what an operation leaves."""

    group: Group
    results: list[tuple[str, Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rank: int = self.group.rank()
        self.size: int = self.group.size()

    def record(self, what: str, *tensors: Tensor) -> None:
        for tensor in tensors:
            kept = tensor.coalesce() if tensor.is_sparse else tensor
            self.results.append((what, kept.clone()))

    def floats(self, numel: int, salt: int = 0, rank: int | None = None) -> Tensor:
        """Sums of these depend on the order in which they are taken."""
        who = self.rank if rank is None else rank
        generator = torch.Generator().manual_seed(1 + who + 100 * salt)
        values = torch.randn(numel, generator=generator)
        return values * values * values  # from tiny to large

    def others(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.rank]


Part: TypeAlias = Callable[[Scenario], None]


def all_reduce(s: Scenario) -> None:
    for numel in SIZES:
        x = s.floats(numel)
        s.group.allreduce([x], dist.AllreduceOptions()).wait()
        s.record(f"all_reduce {numel}", x)
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX):
        options = dist.AllreduceOptions()
        options.reduceOp = op
        for dtype in (torch.float32, *DTYPES):
            x = (s.floats(1001) * 3).clamp(-100, 100).abs().to(dtype)
            s.group.allreduce([x], options).wait()
            s.record(f"all_reduce {op} {dtype}", x)
    for op in (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR):
        options = dist.AllreduceOptions()
        options.reduceOp = op
        x = torch.arange(50) * (s.rank + 3)
        s.group.allreduce([x], options).wait()
        s.record(f"all_reduce {op}", x)


def averages(s: Scenario) -> None:
    """C++ Gloo adds them up in their own type."""
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        xs = [s.floats(33, salt).clamp(-100, 100).to(dtype) for salt in range(s.size)]
        reduce_scatter_options = dist.ReduceScatterOptions()
        reduce_scatter_options.reduceOp = dist.ReduceOp.AVG
        y = torch.empty_like(xs[0])
        s.group.reduce_scatter([y], [xs], reduce_scatter_options).wait()
        s.record(f"reduce_scatter of averages, {dtype}", y)
        reduce_options = dist.ReduceOptions()
        reduce_options.reduceOp = dist.ReduceOp.AVG
        x = xs[0].clone()
        s.group.reduce([x], reduce_options).wait()
        if s.rank == 0:
            s.record(f"reduce of averages, {dtype}", x)
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.AVG
        s.group.allreduce([xs[1]], options).wait()
        s.record(f"all_reduce of averages, {dtype}", xs[1])


def all_reduce_several(s: Scenario) -> None:
    """Each rank's own tensors are added up first, rounded at each step."""
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        xs = [s.floats(1000, salt).clamp(-100, 100).to(dtype) for salt in range(3)]
        s.group.allreduce(xs, dist.AllreduceOptions()).wait()
        s.record(f"all_reduce of three tensors of {dtype}", *xs)


def all_reduce_coalesced(s: Scenario) -> None:
    xs = [s.floats(numel, salt) for salt, numel in enumerate((3, 0, 1000, 7))]
    s.group.allreduce_coalesced(xs, dist.AllreduceCoalescedOptions()).wait()
    s.record("all_reduce_coalesced", *xs)


def all_reduce_sparse(s: Scenario) -> None:
    for entries in (s.rank + 1, 5 * s.rank, 3):
        indices = torch.stack([torch.arange(entries) % 4, torch.arange(entries) * (s.rank + 1) % 9])
        values = s.floats(entries * 2, salt=entries).view(entries, 2)
        x = torch.sparse_coo_tensor(indices, values, (4, 9, 2), check_invariants=True)
        s.group.allreduce([x], dist.AllreduceOptions()).wait()
        s.record("all_reduce sparse", x)


def reduce(s: Scenario) -> None:
    """C++ Gloo clobbers the tensors of other ranks; the root's is what counts."""
    for numel in SIZES:
        for root in range(s.size):
            options = dist.ReduceOptions()
            options.rootRank = root
            x = s.floats(numel, salt=root)
            s.group.reduce([x], options).wait()
            if s.rank == root:
                s.record(f"reduce {numel} to {root}", x)
    # more than two segments a chunk: Gloo passes some of them on too often
    options = dist.ReduceOptions()
    x = s.floats(3 * s.size * MIB // 4)
    s.group.reduce([x], options).wait()
    if s.rank == 0:
        s.record("reduce of many segments", x)


def broadcast(s: Scenario) -> None:
    for numel in OTHER_SIZES:
        for root in range(s.size):
            options = dist.BroadcastOptions()
            options.rootRank = root
            x = s.floats(numel, salt=root)
            s.group.broadcast([x], options).wait()
            s.record(f"broadcast {numel} from {root}", x)


def all_gather(s: Scenario) -> None:
    for numel in OTHER_SIZES:
        outputs = [torch.empty(numel) for _ in range(s.size)]
        s.group.allgather([outputs], [s.floats(numel)], dist.AllgatherOptions()).wait()
        s.record(f"all_gather {numel}", *outputs)
        flat = torch.empty(numel * s.size)
        s.group._allgather_base(flat, s.floats(numel, 1), dist.AllgatherOptions()).wait()
        s.record(f"all_gather_into_tensor {numel}", flat)
    for numel in (0, 1, 3):  # bytes: the halves of a block differ
        outputs = [torch.empty(numel, dtype=torch.uint8) for _ in range(s.size)]
        x = torch.full((numel,), s.rank + 1, dtype=torch.uint8)
        s.group.allgather([outputs], [x], dist.AllgatherOptions()).wait()
        s.record(f"all_gather of {numel} bytes", *outputs)


def all_gather_coalesced(s: Scenario) -> None:
    inputs = [s.floats(numel, numel) for numel in (5, 0, 300)]
    lists = [[torch.empty_like(x) for x in inputs] for _ in range(s.size)]
    s.group.allgather_coalesced(lists, inputs, dist.AllgatherOptions()).wait()
    s.record("all_gather_coalesced", *[x for outputs in lists for x in outputs])


def gather(s: Scenario) -> None:
    for numel in OTHER_SIZES:
        for root in range(s.size):
            options = dist.GatherOptions()
            options.rootRank = root
            outputs = [torch.empty(numel) for _ in range(s.size)] if s.rank == root else []
            lists = [outputs] if s.rank == root else []
            s.group.gather(lists, [s.floats(numel, root)], options).wait()
            s.record(f"gather {numel} to {root}", *outputs)


def scatter(s: Scenario) -> None:
    for numel in OTHER_SIZES:
        for root in range(s.size):
            options = dist.ScatterOptions()
            options.rootRank = root
            output = torch.empty(numel)
            inputs = [s.floats(numel, salt) for salt in range(s.size)]
            s.group.scatter([output], [inputs] if s.rank == root else [], options).wait()
            s.record(f"scatter {numel} from {root}", output)


def reduce_scatter(s: Scenario) -> None:
    for numel in (*OTHER_SIZES, MIB // 4 + 1):
        output = torch.empty(numel)
        inputs = [s.floats(numel, salt) for salt in range(s.size)]
        s.group.reduce_scatter([output], [inputs], dist.ReduceScatterOptions()).wait()
        s.record(f"reduce_scatter {numel}", output)
        s.group._reduce_scatter_base(
            output, s.floats(numel * s.size, 3), dist.ReduceScatterOptions()
        ).wait()
        s.record(f"reduce_scatter_tensor {numel}", output)


def all_to_all(s: Scenario) -> None:
    for numel in OTHER_SIZES:
        output = torch.empty(numel * s.size)
        x = s.floats(numel * s.size)
        s.group.alltoall_base(output, x, [], [], dist.AllToAllOptions()).wait()
        s.record(f"all_to_all_single {numel}", output)
    sent = [(s.rank * 3 + to * 5) % 7 for to in range(s.size)]
    received = [(source * 3 + s.rank * 5) % 7 for source in range(s.size)]
    output = torch.empty(sum(received), 2)
    x = s.floats(2 * sum(sent)).view(-1, 2)
    s.group.alltoall_base(output, x, received, sent, dist.AllToAllOptions()).wait()
    s.record("all_to_all_single, uneven", output)


def barriers(s: Scenario) -> None:
    s.group.barrier(dist.BarrierOptions()).wait()
    s.group.monitored_barrier(TIMEOUT, False)
    s.group.monitored_barrier(TIMEOUT, True)
    s.group.barrier(dist.BarrierOptions()).wait()
    # tags are taken by calls that have not begun, too
    outputs = [torch.empty(70_000) for _ in range(3)]
    inputs = [[s.floats(70_000, salt) for salt in range(s.size)] for _ in outputs]
    works = [
        s.group.reduce_scatter([output], [given], dist.ReduceScatterOptions())
        for output, given in zip(outputs, inputs, strict=True)
    ]
    s.group.monitored_barrier(TIMEOUT, False)
    for work in works:
        work.wait()
    s.record("reduce_scatter during a monitored_barrier", *outputs)


def asynchronous(s: Scenario) -> None:
    """Several collectives at once: C++ Gloo runs two at a time."""
    xs = [s.floats(numel, numel) for numel in (10, 300_000, 0, 1000, 70_000)]
    works = [s.group.allreduce([x], dist.AllreduceOptions()) for x in xs]
    for work in works:
        work.wait()
    s.record("five all_reduces at once", *xs)


def messages(s: Scenario) -> None:
    for numel in OTHER_SIZES:
        for tag in (0, 3):
            sends, receives, incoming = [], [], []
            for other in s.others():
                incoming.append(torch.empty(numel))
                # some receives come before and some after their sends
                if other > s.rank:
                    receives.append(s.group.recv([incoming[-1]], other, tag))
                sends.append(s.group.send([s.floats(numel, tag)], other, tag))
                if other < s.rank:
                    receives.append(s.group.recv([incoming[-1]], other, tag))
            for work in receives + sends:
                work.wait()
            s.record(f"messages of {numel}, tag {tag}", *incoming)


def messages_of_other_dtypes(s: Scenario) -> None:
    for dtype in (torch.bool, torch.int16, torch.complex64, torch.bfloat16):
        right, left = (s.rank + 1) % s.size, (s.rank - 1) % s.size
        x, y = s.floats(33).to(dtype), torch.empty(33, dtype=dtype)
        send, receive = s.group.send([x], right, 1), s.group.recv([y], left, 1)
        receive.wait()
        send.wait()
        s.record(f"message of {dtype}", y)


def from_anyone(s: Scenario) -> None:
    """The order in which messages arrive varies, but each of them arrives."""
    if s.rank == 0:
        seen = []
        for _ in range(2 * (s.size - 1)):
            x = torch.empty(2)
            s.group.recv_anysource([x], 4).wait()
            seen.append(x)
        s.record("from anyone", torch.stack(sorted(seen, key=torch.Tensor.tolist)))
    else:
        for i in range(2):
            s.group.send([torch.tensor([float(s.rank), float(i)])], 0, 4).wait()


PARTS: dict[str, Part] = {
    part.__name__: part
    for part in (
        all_reduce,
        averages,
        all_reduce_several,
        all_reduce_coalesced,
        all_reduce_sparse,
        reduce,
        broadcast,
        all_gather,
        all_gather_coalesced,
        gather,
        scatter,
        reduce_scatter,
        all_to_all,
        barriers,
        asynchronous,
        messages,
        messages_of_other_dtypes,
        from_anyone,
    )
}


def cpp_group(store: Store, rank: int, size: int, lazy: bool, interfaces: int) -> Group:
    options = dist.ProcessGroupGloo._Options()
    options._devices = [
        dist.ProcessGroupGloo.create_device(interface="lo", lazy_init=lazy)
        for _ in range(interfaces)
    ]
    options._timeout = TIMEOUT
    return dist.ProcessGroupGloo(store, rank, size, options)


def our_group(store: Store, rank: int, size: int, interfaces: int) -> Group:
    options = impl.gloo.Options(TIMEOUT, transport="gloo", interface=",".join(["lo"] * interfaces))
    return impl.gloo.ProcessGroupGloo(store, rank, size, options=options, name="mixed")


Results: TypeAlias = list[list[tuple[str, Tensor]]]


def run_mixed(
    placement: str, parts: list[Part], *, lazy: bool = False, interfaces: int = 1
) -> Results:
    """Run parts of the scenario in one group. `placement`: a letter a rank, c for C++, p for us."""
    store = HashStore()
    size = len(placement)

    def rank_function(rank: int) -> list[tuple[str, Tensor]]:
        if placement[rank] == "c":
            group = cpp_group(store, rank, size, lazy, interfaces)
        else:
            group = our_group(store, rank, size, interfaces)
        scenario = Scenario(group)
        for part in parts:
            part(scenario)
        # Gloo has no farewell: no rank may close while another one still waits
        group.barrier(dist.BarrierOptions()).wait()
        if store.add("done", 1) == size:
            store.set("all done", "")
        store.wait(["all done"], TIMEOUT)
        if placement[rank] == "p":
            group.shutdown()
        return scenario.results

    return run_ranks(size, rank_function)

"""Groups across several hosts: who does what. All communicators run over shared memory here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from impl import errors
from impl.transport.base import Communicator
from impl.transport.mixed import MixedCommunicator
from impl.transport.shm import ShmCommunicator, meet
from tests.impl.threads import on_threads
from tests.impl.transport.combines import SUM
from tests.impl.transport.shm_ranks import SMALL_SEGMENT_NBYTES, call, soon

_T = TypeVar("_T")

ISLANDS = [
    [[0, 1], [2, 3]],
    [[0], [1, 2]],
    [[0, 2, 4], [1, 3]],
    [[0, 3], [1], [2, 4, 5]],
]
each_shape = pytest.mark.parametrize("islands", ISLANDS, ids=str)
NUMELS = [0, 1, 3000]


def shared_memory(store: dist.Store, name: str, rank: int, world_size: int) -> Communicator:
    meeting = meet(
        dist.PrefixStore(name, store),
        rank,
        world_size,
        group=name,
        segment_nbytes=SMALL_SEGMENT_NBYTES,
        until=soon(),
    )
    assert meeting.mapping is not None
    return ShmCommunicator(
        meeting.mapping,
        range(world_size),
        rank,
        group=name,
        segment_nbytes=SMALL_SEGMENT_NBYTES,
    )


def in_islands(
    islands: Sequence[Sequence[int]], rank_function: Callable[[MixedCommunicator], _T]
) -> list[_T]:
    """Call `rank_function(communicator)` on one thread a rank; the results by rank."""
    store = dist.HashStore()
    world_size = sum(map(len, islands))

    def run(rank: int) -> _T:
        home = next(i for i, members in enumerate(islands) if rank in members)
        members = islands[home]
        position = members.index(rank)
        island = (
            shared_memory(store, f"island {home}", position, len(members))
            if len(members) > 1
            else None
        )
        leaders = shared_memory(store, "leaders", home, len(islands)) if position == 0 else None
        world = shared_memory(store, "world", rank, world_size)
        comm = MixedCommunicator(rank, islands, island, leaders, world)
        try:
            return rank_function(comm)
        finally:
            comm.close()

    return on_threads(world_size, run)


def own(rank: int, numel: int) -> Tensor:
    return torch.arange(float(numel)) + 10 * rank


def total(world_size: int, numel: int) -> Tensor:
    return world_size * torch.arange(float(numel)) + 10 * sum(range(world_size))


@each_shape
@pytest.mark.parametrize("numel", NUMELS)
def test_all_reduce(islands: list[list[int]], numel: int) -> None:
    def run(comm: MixedCommunicator) -> Tensor:
        tensor = own(comm.rank, numel)
        comm.all_reduce(tensor, SUM, call(), soon())
        return tensor

    results = in_islands(islands, run)
    assert all(torch.equal(got, total(len(results), numel)) for got in results)


@each_shape
@pytest.mark.parametrize("root", [0, 1, -1])
def test_reduce_and_broadcast_with_any_root(islands: list[list[int]], root: int) -> None:
    world_size = sum(map(len, islands))
    root %= world_size

    def run(comm: MixedCommunicator) -> tuple[Tensor, Tensor]:
        reduced, copied = own(comm.rank, 50), own(comm.rank, 50)
        comm.reduce(reduced, root, SUM, call("reduce"), soon())
        comm.broadcast(copied, root, call("broadcast"), soon())
        return reduced, copied

    for rank, (reduced, copied) in enumerate(in_islands(islands, run)):
        want = total(world_size, 50) if rank == root else own(rank, 50)
        assert torch.equal(reduced, want)
        assert torch.equal(copied, own(root, 50))


@each_shape
@pytest.mark.parametrize("numel", NUMELS)
def test_gathers_put_rows_in_the_order_of_the_ranks(islands: list[list[int]], numel: int) -> None:
    world_size = sum(map(len, islands))

    def run(comm: MixedCommunicator) -> tuple[Tensor, list[Tensor]]:
        output = torch.zeros(world_size * numel)
        comm.all_gather(output, own(comm.rank, numel), call("all_gather"), soon())
        rows = [torch.zeros(rank * numel // 2) for rank in range(world_size)]
        comm.all_gather_v(rows, own(comm.rank, rows[comm.rank].numel()), call("v"), soon())
        return output, rows

    for output, rows in in_islands(islands, run):
        assert torch.equal(output, torch.cat([own(rank, numel) for rank in range(world_size)]))
        for rank, row in enumerate(rows):
            assert torch.equal(row, own(rank, row.numel()))


@each_shape
@pytest.mark.parametrize("numel", NUMELS)
def test_reduce_scatter(islands: list[list[int]], numel: int) -> None:
    world_size = sum(map(len, islands))

    def run(comm: MixedCommunicator) -> tuple[Tensor, bool]:
        source = own(comm.rank, world_size * numel)
        output = torch.zeros(numel)
        comm.reduce_scatter(output, source, SUM, call("reduce_scatter"), soon())
        return output, torch.equal(source, own(comm.rank, world_size * numel))

    for rank, (output, input_stayed) in enumerate(in_islands(islands, run)):
        want = total(world_size, world_size * numel)[rank * numel : (rank + 1) * numel]
        assert torch.equal(output, want)
        assert input_stayed


@each_shape
def test_what_goes_between_all_ranks(islands: list[list[int]]) -> None:
    world_size = sum(map(len, islands))

    def run(comm: MixedCommunicator) -> None:
        even = [2] * world_size
        output = torch.zeros(2 * world_size)
        given = own(comm.rank, 2 * world_size)
        comm.all_to_all(output, given, even, even, call("all_to_all"), soon())
        assert output[0] == 2 * comm.rank
        gathered = [torch.zeros(3) for _ in range(world_size)] if comm.rank == 1 else None
        comm.gather(gathered, own(comm.rank, 3), 1, call("gather"), soon())
        back = torch.zeros(3)
        comm.scatter(back, gathered, 1, call("scatter"), soon())
        assert torch.equal(back, own(comm.rank, 3))
        comm.barrier(call("barrier"), soon())
        right = (comm.rank + 1) % world_size
        sent = comm.post_send(own(comm.rank, 4), right, 5, call("send"), soon())
        got = torch.zeros(4)
        received = comm.post_recv(got, (comm.rank - 1) % world_size, 5, call("recv"), soon())
        assert received.wait(30)
        assert sent.wait(30)
        assert torch.equal(got, own((comm.rank - 1) % world_size, 4))

    in_islands(islands, run)


@each_shape
def test_ranks_that_disagree_all_hear_of_it_and_keep_their_tensors(
    islands: list[list[int]],
) -> None:
    def run(comm: MixedCommunicator) -> None:
        numel = 3 + (comm.rank == 0)
        signature = f"numel={numel}"
        x = torch.ones(numel)
        with pytest.raises(errors.CommunicationError, match="disagree on numel"):
            comm.broadcast(x, 0, call("broadcast", signature), soon())
        with pytest.raises(errors.CommunicationError):
            comm.all_reduce(x, SUM, call("all_reduce", signature), soon())
        assert torch.equal(x, torch.ones(numel))

    in_islands(islands, run)


def test_a_wrong_size_is_noticed_by_every_rank() -> None:
    def run(comm: MixedCommunicator) -> None:
        rows = [torch.zeros(2) for _ in range(4)]
        given = torch.zeros(2 + (comm.rank == 3))
        with pytest.raises(errors.CommunicationError):
            comm.all_gather_v(rows, given, call("all_gather_v"), soon())

    in_islands([[0, 1], [2, 3]], run)

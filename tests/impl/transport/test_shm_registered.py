"""Collectives on registered memory, alone and beside ordinary memory, at any offset."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from impl import errors
from impl.transport.shm import ShmCommunicator, arena, copying, reducing, registered
from impl.transport.shm.mapping import SharingRefused
from tests.impl.transport.combines import SUM
from tests.impl.transport.shm_ranks import call, on_ranks, soon
from tests.impl.transport.test_shm_collectives import in_rank_order, inputs

WORLD_SIZES = [2, 3, 4]
NUMELS = [
    9_000,
    40_001,
]  # of a few segments, and of many; some of them end in the middle of a block
TIMES = 2  # the first call maps the arenas, and the others use them

# which ranks have their tensors in registered memory
WHO: dict[str, Callable[[int], bool]] = {
    "all": lambda rank: True,
    "even ranks": lambda rank: rank % 2 == 0,
    "all but rank 0": lambda rank: rank > 0,
}


@pytest.fixture(autouse=True)
def _small_tensors_count(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (registered, copying, reducing):
        monkeypatch.setattr(module, "REGISTERED_FROM_NBYTES", 4096)


each_case = pytest.mark.parametrize(
    ("world_size", "numel", "who"),
    [(world_size, numel, who) for world_size in WORLD_SIZES for numel in NUMELS for who in WHO],
)


def lay(comm: ShmCommunicator, given: Tensor, who: str) -> Tensor:
    """`given` at an offset in registered memory, on the ranks that have it; otherwise a copy."""
    if not WHO[who](comm.rank):
        return given.clone()
    before = 3 + comm.rank
    whole = comm.allocate(given.numel() + before + 5, given.dtype)
    assert whole is not None
    return whole[before : before + given.numel()].copy_(given)


def frame(tensor: Tensor) -> Tensor:
    """All of the memory in which a tensor lies."""
    return torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())


@each_case
def test_all_reduce(world_size: int, numel: int, who: str) -> None:
    given = inputs(world_size, numel)

    def reduce(comm: ShmCommunicator) -> list[Tensor]:
        got = []
        for _ in range(TIMES):
            tensor = lay(comm, given[comm.rank], who)
            around = frame(tensor).fill_(7.0)
            tensor.copy_(given[comm.rank])
            comm.all_reduce(tensor, SUM, call(), soon())
            got.append(tensor.clone())
            assert int((around == 7.0).sum()) == around.numel() - numel
        return got

    for results in on_ranks(world_size, reduce):
        assert all(torch.equal(got, in_rank_order(given)) for got in results)


@each_case
@pytest.mark.parametrize("in_place", [False, True])
def test_reduce_scatter(world_size: int, numel: int, who: str, in_place: bool) -> None:
    given = inputs(world_size, numel * world_size)

    def scatter(comm: ShmCommunicator) -> list[Tensor]:
        got = []
        for _ in range(TIMES):
            source = lay(comm, given[comm.rank], who)
            own = source[comm.rank * numel : (comm.rank + 1) * numel]
            output = own if in_place else torch.empty(numel)
            comm.reduce_scatter(output, source, SUM, call("reduce_scatter"), soon())
            got.append(output.clone())
            output.zero_()
            assert in_place or torch.equal(source, given[comm.rank])
            source.zero_()  # its owner may, as soon as the call has ended
        return got

    want = in_rank_order(given).split(numel)
    for rank, results in enumerate(on_ranks(world_size, scatter)):
        assert all(torch.equal(got, want[rank]) for got in results)


@each_case
def test_broadcast(world_size: int, numel: int, who: str) -> None:
    given = inputs(world_size, numel)

    def broadcast(comm: ShmCommunicator) -> list[Tensor]:
        got = []
        for root in range(world_size):
            for _ in range(TIMES):
                tensor = lay(comm, given[comm.rank], who)
                comm.broadcast(tensor, root, call("broadcast"), soon())
                got.append(tensor.clone())
                tensor.zero_()
        return got

    for results in on_ranks(world_size, broadcast):
        assert all(torch.equal(got, given[i // TIMES]) for i, got in enumerate(results))


@each_case
@pytest.mark.parametrize("in_place", [False, True])
def test_all_gather(world_size: int, numel: int, who: str, in_place: bool) -> None:
    given = inputs(world_size, numel)

    def gather(comm: ShmCommunicator) -> list[Tensor]:
        got = []
        for _ in range(TIMES):
            output = lay(comm, torch.zeros(world_size * numel), who)
            source = lay(comm, given[comm.rank], who)
            if in_place:
                source = output[comm.rank * numel : (comm.rank + 1) * numel].copy_(source)
            comm.all_gather(output, source, call("all_gather"), soon())
            got.append(output.clone())
            source.zero_()
        return got

    for results in on_ranks(world_size, gather):
        assert all(torch.equal(got, torch.cat(given)) for got in results)


@each_case
def test_gather(world_size: int, numel: int, who: str) -> None:
    given = inputs(world_size, numel)
    root = world_size - 1

    def gather(comm: ShmCommunicator) -> list[list[Tensor]]:
        got = []
        for _ in range(TIMES):
            source = lay(comm, given[comm.rank], who)
            outputs = [torch.zeros(numel) for _ in given] if comm.rank == root else None
            comm.gather(outputs, source, root, call("gather"), soon())
            source.zero_()
            got.append(outputs or given)
        return got

    for results in on_ranks(world_size, gather):
        for got in results:
            assert all(torch.equal(a, b) for a, b in zip(got, given, strict=True))


@each_case
@pytest.mark.parametrize("even", [False, True])
def test_all_to_all(world_size: int, numel: int, who: str, even: bool) -> None:
    share = numel // world_size
    splits = [
        [share if even else share * ((i + 2 * j) % 4) for j in range(world_size)]
        for i in range(world_size)
    ]
    given = [torch.arange(float(sum(splits[i]))) + 1e6 * i for i in range(world_size)]

    def exchange(comm: ShmCommunicator) -> list[Tensor]:
        got = []
        received = [splits[i][comm.rank] for i in range(world_size)]
        for _ in range(TIMES):
            source, output = lay(comm, given[comm.rank], who), torch.zeros(sum(received))
            comm.all_to_all(output, source, received, splits[comm.rank], call("all_to_all"), soon())
            got.append(output)
            source.zero_()
        return got

    for rank, results in enumerate(on_ranks(world_size, exchange)):
        want = torch.cat([given[i].split(splits[i])[rank] for i in range(world_size)])
        assert all(torch.equal(got, want) for got in results)


def test_calls_of_all_kinds_follow_each_other() -> None:
    """Slots' halves and announcements are used by all of them in turn."""

    def run(comm: ShmCommunicator) -> None:
        for number in range(60):
            who = list(WHO)[number % len(WHO)]
            given = torch.full((20_000,), float(comm.rank + number))
            tensor = lay(comm, given, who)
            comm.all_reduce(tensor, SUM, call(), soon())
            assert torch.equal(tensor, torch.full((20_000,), 3.0 * number + 3))
            small = torch.tensor([float(number + comm.rank)])
            comm.all_reduce(small, SUM, call(), soon())
            assert float(small) == 3.0 * number + 3
            tensor = lay(comm, given, who)
            comm.broadcast(tensor, number % 3, call("broadcast"), soon())
            assert torch.equal(tensor, torch.full((20_000,), float(number % 3 + number)))

    on_ranks(3, run)


def test_one_rank_that_cannot_map_an_arena_sends_all_through_the_slots(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls = 0

    def refuse_once(offer: str, nbytes: int) -> registered.PeerMemory:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise SharingRefused("it lives elsewhere")
        return registered.PeerMemory(offer, nbytes)

    monkeypatch.setattr(registered.PeerMemory, "of", refuse_once)
    given = inputs(3, 30_000)

    def reduce(comm: ShmCommunicator) -> list[Tensor]:
        got = []
        for _ in range(3):
            tensor = lay(comm, given[comm.rank], "all")
            comm.all_reduce(tensor, SUM, call(), soon())
            got.append(tensor)
        return got

    for results in on_ranks(3, reduce):
        assert all(torch.equal(got, in_rank_order(given)) for got in results)
    assert calls == 6, "mapping is tried once"
    assert "it lives elsewhere" in caplog.text


def test_a_mismatch_changes_nothing_and_the_group_goes_on() -> None:
    def disagree(comm: ShmCommunicator) -> Tensor:
        tensor = lay(comm, torch.ones(20_000), "all")
        for _ in range(TIMES):
            with pytest.raises(errors.CollectiveMismatch):
                comm.all_reduce(tensor, SUM, call("all_reduce", f"numel={comm.rank}"), soon())
            assert tensor.eq(1).all()
            comm.all_reduce(tensor, SUM, call(), soon())
            tensor.fill_(1.0)
        return tensor

    on_ranks(3, disagree)


def test_a_rank_that_does_not_come_is_named() -> None:
    is_over = threading.Event()

    def wait(comm: ShmCommunicator) -> None:
        tensor = lay(comm, torch.ones(20_000), "all")
        comm.all_reduce(tensor, SUM, call(), soon())
        if comm.rank == 0:
            with pytest.raises(errors.CollectiveTimeout, match="rank 1 has not joined"):
                comm.all_reduce(tensor, SUM, call(), soon(0.2))
            is_over.set()
        assert is_over.wait(30)

    on_ranks(2, wait)


def test_tensors_outlive_their_group_and_the_arena_goes_with_the_last() -> None:
    def use(comm: ShmCommunicator) -> Tensor:
        tensor = lay(comm, torch.ones(20_000), "all")
        comm.all_reduce(tensor, SUM, call(), soon())
        return tensor

    results = on_ranks(2, use)
    assert all(tensor.eq(2).all() for tensor in results)
    assert arena.current() is not None
    results.clear()
    assert arena.current() is None
    assert not registered._mapped

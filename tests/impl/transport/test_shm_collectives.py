"""Collectives over shared memory, on segments so small that everything takes several rounds."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from impl import errors
from impl.transport.base import CallInfo
from impl.transport.shm import ShmCommunicator, words
from tests.impl.transport.combines import SUM
from tests.impl.transport.shm_ranks import SMALL_SEGMENT_NBYTES, call, on_ranks, soon

WORLD_SIZES = [1, 2, 3, 4, 5, 8]
# around one line, one segment of float32, and well past both
NUMELS = [0, 1, 17, SMALL_SEGMENT_NBYTES // 4 - 1, SMALL_SEGMENT_NBYTES // 4 + 1, 20_000]

each_world = pytest.mark.parametrize("world_size", WORLD_SIZES)
each_numel = pytest.mark.parametrize("numel", NUMELS)


def inputs(world_size: int, numel: int) -> list[Tensor]:
    """One tensor a rank; floats whose sum depends on the order of addition."""
    generator = torch.Generator().manual_seed(numel)
    return [torch.randn(numel, generator=generator) * 10**rank for rank in range(world_size)]


def in_rank_order(tensors: list[Tensor]) -> Tensor:
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total += tensor
    return total


@each_world
@each_numel
def test_all_reduce_adds_in_rank_order(world_size: int, numel: int) -> None:
    given = inputs(world_size, numel)

    def reduce(comm: ShmCommunicator) -> Tensor:
        tensor = given[comm.rank].clone()
        comm.all_reduce(tensor, SUM, call(), soon())
        return tensor

    for got in on_ranks(world_size, reduce):
        assert torch.equal(got, in_rank_order(given))


@each_world
@each_numel
def test_reduce_changes_the_root_alone(world_size: int, numel: int) -> None:
    given = inputs(world_size, numel)
    root = world_size // 2

    def reduce(comm: ShmCommunicator) -> Tensor:
        tensor = given[comm.rank].clone()
        comm.reduce(tensor, root, SUM, call("reduce"), soon())
        return tensor

    for rank, got in enumerate(on_ranks(world_size, reduce)):
        assert torch.equal(got, in_rank_order(given) if rank == root else given[rank])


@each_world
@each_numel
@pytest.mark.parametrize("in_place", [False, True])
def test_reduce_scatter(world_size: int, numel: int, in_place: bool) -> None:
    given = inputs(world_size, numel * world_size)

    def scatter(comm: ShmCommunicator) -> Tensor:
        source = given[comm.rank].clone()
        own = source[comm.rank * numel : (comm.rank + 1) * numel]
        output = own if in_place else torch.empty(numel)
        comm.reduce_scatter(output, source, SUM, call("reduce_scatter"), soon())
        return output

    want = in_rank_order(given).split(numel) if numel else [torch.empty(0)] * world_size
    for rank, got in enumerate(on_ranks(world_size, scatter)):
        assert torch.equal(got, want[rank])


@each_world
@each_numel
def test_broadcast(world_size: int, numel: int) -> None:
    given = inputs(world_size, numel)
    root = world_size - 1

    def broadcast(comm: ShmCommunicator) -> Tensor:
        tensor = given[comm.rank].clone()
        comm.broadcast(tensor, root, call("broadcast"), soon())
        return tensor

    for got in on_ranks(world_size, broadcast):
        assert torch.equal(got, given[root])


@each_world
@each_numel
@pytest.mark.parametrize("in_place", [False, True])
def test_all_gather(world_size: int, numel: int, in_place: bool) -> None:
    given = inputs(world_size, numel)

    def gather(comm: ShmCommunicator) -> Tensor:
        output = torch.zeros(world_size * numel)
        own = output[comm.rank * numel : (comm.rank + 1) * numel]
        own.copy_(given[comm.rank])
        source = own if in_place else given[comm.rank]
        comm.all_gather(output, source, call("all_gather"), soon())
        return output

    for got in on_ranks(world_size, gather):
        assert torch.equal(got, torch.cat(given))


@each_world
@pytest.mark.parametrize("scale", [0, 1, 3000])
def test_all_gather_v_of_different_sizes(world_size: int, scale: int) -> None:
    given = [torch.full((scale * (rank % 3),), float(rank)) for rank in range(world_size)]

    def gather(comm: ShmCommunicator) -> list[Tensor]:
        outputs = [torch.zeros_like(tensor) for tensor in given]
        comm.all_gather_v(outputs, given[comm.rank], call("all_gather_v"), soon())
        return outputs

    for got in on_ranks(world_size, gather):
        assert all(torch.equal(a, b) for a, b in zip(got, given, strict=True))


@each_world
@each_numel
def test_gather_and_scatter_are_inverse(world_size: int, numel: int) -> None:
    given = inputs(world_size, numel)
    root = world_size // 2

    def there_and_back(comm: ShmCommunicator) -> Tensor:
        outputs = [torch.zeros(numel) for _ in range(world_size)] if comm.rank == root else None
        comm.gather(outputs, given[comm.rank], root, call("gather"), soon())
        if outputs is not None:
            assert all(torch.equal(a, b) for a, b in zip(outputs, given, strict=True))
        output = torch.zeros(numel)
        comm.scatter(output, outputs, root, call("scatter"), soon())
        return output

    for rank, got in enumerate(on_ranks(world_size, there_and_back)):
        assert torch.equal(got, given[rank])


@each_world
@pytest.mark.parametrize("scale", [0, 1, 700])
def test_all_to_all_of_uneven_splits(world_size: int, scale: int) -> None:
    splits = [[scale * ((i + 2 * j) % 4) for j in range(world_size)] for i in range(world_size)]
    given = [torch.arange(float(sum(splits[i]))) + 1e6 * i for i in range(world_size)]

    def exchange(comm: ShmCommunicator) -> Tensor:
        received = [splits[i][comm.rank] for i in range(world_size)]
        output = torch.zeros(sum(received))
        source = given[comm.rank]
        comm.all_to_all(output, source, received, splits[comm.rank], call("all_to_all"), soon())
        return output

    for rank, got in enumerate(on_ranks(world_size, exchange)):
        want = [given[i].split(splits[i])[rank] for i in range(world_size)]
        assert torch.equal(got, torch.cat(want))


def test_other_dtypes_move_by_their_size() -> None:
    def gather(comm: ShmCommunicator) -> None:
        for dtype in (torch.uint8, torch.bool, torch.bfloat16, torch.int64, torch.float64):
            source = torch.ones(5000, dtype=dtype)
            output = torch.zeros(3 * 5000, dtype=dtype)
            comm.all_gather(output, source, call("all_gather"), soon())
            assert output.eq(1).all()

    on_ranks(3, gather)


def test_a_fast_rank_does_not_overrun_a_slow_one() -> None:
    def run(comm: ShmCommunicator) -> list[float]:
        seen = []
        for number in range(300):
            tensor = torch.tensor([float(number + comm.rank)])
            comm.all_reduce(tensor, SUM, call(), soon())
            seen.append(float(tensor))
        return seen

    for got in on_ranks(3, run):
        assert got == [3.0 * number + 3 for number in range(300)]


# -- disagreement


def test_a_mismatch_is_an_error_on_every_rank_and_the_group_goes_on() -> None:
    def disagree(comm: ShmCommunicator) -> tuple[str, Tensor]:
        tensor = torch.ones(4)
        dtype = "float16" if comm.rank == 2 else "float32"
        with pytest.raises(errors.CollectiveMismatch) as caught:
            comm.all_reduce(
                tensor,
                SUM,
                call("all_reduce", f"op=sum dtype={dtype} numel=4", f"sum {dtype} (4,)"),
                soon(),
            )
        assert tensor.tolist() == [1.0] * 4
        comm.all_reduce(tensor, SUM, call(), soon())
        return str(caught.value), tensor

    for message, tensor in on_ranks(3, disagree):
        assert message == (
            "all_reduce #3 on group 'g': ranks disagree on dtype.\n"
            "  rank 0  sum float32 (4,)\n"
            "  rank 1  sum float32 (4,)\n"
            "  rank 2  sum float16 (4,)   <- differs"
        )
        assert tensor.tolist() == [3.0] * 4


def test_different_collectives_are_named() -> None:
    def barrier(comm: ShmCommunicator) -> None:
        comm.barrier(call("barrier"), soon())

    def broadcast(comm: ShmCommunicator) -> None:
        comm.broadcast(torch.ones(9000), 0, call("broadcast", "", "float32"), soon())

    def disagree(comm: ShmCommunicator) -> str:
        with pytest.raises(errors.CollectiveMismatch) as caught:
            barrier(comm) if comm.rank == 0 else broadcast(comm)
        comm.barrier(call("barrier"), soon())
        return str(caught.value)

    for message in on_ranks(3, disagree):
        assert "disagree on the operation" in message
        assert "rank 0  barrier             <- differs" in message
        assert "rank 1  broadcast float32\n" in message


def test_splits_that_do_not_fit_are_an_error_on_every_rank() -> None:
    def disagree(comm: ShmCommunicator) -> str:
        received = [1, 1, 2] if comm.rank == 0 else [1, 1, 1]
        with pytest.raises(errors.CollectiveMismatch) as caught:
            comm.all_to_all(
                torch.zeros(sum(received)),
                torch.zeros(3),
                received,
                [1, 1, 1],
                call("all_to_all"),
                soon(),
            )
        return str(caught.value)

    for message in on_ranks(3, disagree):
        assert "rank 2 sends 1 elements to rank 0, which expects 2" in message


def test_sizes_that_do_not_fit_are_an_error_on_every_rank() -> None:
    def disagree(comm: ShmCommunicator) -> str:
        outputs = [torch.zeros(1), torch.zeros(2 if comm.rank == 0 else 3)]
        source = torch.zeros(1 if comm.rank == 0 else 3)
        with pytest.raises(errors.CollectiveMismatch) as caught:
            comm.all_gather_v(outputs, source, call("all_gather_v"), soon())
        return str(caught.value)

    for message in on_ranks(2, disagree):
        assert "rank 1 gives 3 elements, but rank 0 has room for 2" in message


# -- the end of a group


def test_a_timeout_names_the_missing_rank_on_every_rank() -> None:
    def wait_for_rank_2(comm: ShmCommunicator) -> str:
        comm.barrier(call("barrier"), soon())
        while comm.rank == 2 and not comm._membership.board.is_decided():
            time.sleep(0.001)  # it comes when the others have given up
        with pytest.raises(errors.CollectiveTimeout) as caught:
            comm.barrier(call("barrier"), soon(0.5))
        return str(caught.value)

    for message in on_ranks(3, wait_for_rank_2):
        assert "rank 2 has not joined (rank 2 last called barrier #3)" in message
        assert "Timed out waiting 500ms for barrier operation to complete" in message


@pytest.mark.parametrize("numel", [10, 1024, 2048, 3072])
def test_a_timeout_names_the_last_call_whatever_its_number_of_rounds(numel: int) -> None:
    def wait_for_rank_1(comm: ShmCommunicator) -> str:
        comm.barrier(CallInfo("barrier", 0, "", ""), soon())
        comm.broadcast(torch.zeros(numel), 0, CallInfo("broadcast", 1, "", ""), soon())
        while comm.rank == 1 and not comm._membership.board.is_decided():
            time.sleep(0.001)  # it comes when the other has given up
        with pytest.raises(errors.CollectiveTimeout) as caught:
            comm.barrier(CallInfo("barrier", 2, "", ""), soon(0.2))
        return str(caught.value)

    for message in on_ranks(2, wait_for_rank_1):
        assert "rank 1 last called broadcast #1" in message


def test_abort_ends_waits_and_later_calls_on_every_rank() -> None:
    def abort(comm: ShmCommunicator) -> None:
        if comm.rank == 1:
            comm.abort("had enough")
        for _ in range(2):
            with pytest.raises(errors.Aborted, match="aborted on rank 1: had enough"):
                comm.barrier(call("barrier"), soon())
        with pytest.raises(errors.Aborted, match="had enough"):
            comm.post_send(torch.ones(1), 0, 0, call("send"), soon())

    on_ranks(3, abort)


def test_a_rank_that_left_is_missed_at_once() -> None:
    def leave(comm: ShmCommunicator) -> None:
        comm.barrier(call("barrier"), soon())
        if comm.rank == 0:
            return
        with pytest.raises(errors.PeerLost, match=r"lost rank 0 of 3 \(it left the group\)"):
            comm.barrier(call("barrier"), soon())

    on_ranks(3, leave)


def test_an_interrupted_collective_ends_the_group() -> None:
    class Interrupted(Exception):
        pass

    class Interrupt:
        name = "sum"

        def __call__(self, accumulator: Tensor, incoming: Tensor) -> None:
            raise Interrupted

        def fold(self, out: Tensor, parts: Sequence[Tensor]) -> None:
            raise Interrupted

    def interrupt(comm: ShmCommunicator) -> None:
        if comm.rank == 0:
            with pytest.raises(Interrupted):
                comm.all_reduce(torch.ones(1), Interrupt(), call(), soon())
        else:
            comm.all_reduce(torch.ones(1), SUM, call(), soon())
        with pytest.raises(errors.Aborted, match="interrupted"):
            comm.barrier(call("barrier"), soon())

    on_ranks(2, interrupt)


def test_after_close_everything_is_refused() -> None:
    def close(comm: ShmCommunicator) -> None:
        comm.barrier(call("barrier"), soon())
        comm.close()
        comm.close()
        comm.abort("too late")
        with pytest.raises(errors.Aborted, match="destroyed"):
            comm.barrier(call("barrier"), soon())
        with pytest.raises(errors.Aborted, match="destroyed"):
            comm.post_recv(torch.ones(1), 0, 0, call("recv"), soon())

    on_ranks(2, close)


# -- other processors


def test_publication_where_loads_are_not_ordered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The code for 64-bit Arm: here it can only be shown to do no harm."""
    monkeypatch.setattr(words, "LOADS_ARE_ORDERED", False)

    def run(comm: ShmCommunicator) -> float:
        tensor = torch.ones(5000)
        for _ in range(20):
            comm.all_reduce(tensor, SUM, call(), soon())
            tensor /= 3
        peer = (comm.rank + 1) % 3
        sent = comm.post_send(torch.ones(100_000), peer, 0, call("send"), soon())
        got = torch.zeros(100_000)
        assert comm.post_recv(got, (comm.rank - 1) % 3, 0, call("recv"), soon()).wait(30)
        assert sent.wait(30)
        return float(tensor.sum() + got.sum())

    assert on_ranks(3, run) == [105_000.0] * 3

"""Groups over real sockets, in both modes: results of collectives, and ways to connect."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from impl import errors
from impl.transport.base import ANY_SOURCE, Communicator
from impl.transport.meeting import interfaces as devices
from tests.impl.transport.combines import SUM, assert_is_sum, random_floats
from tests.impl.transport.ranks import MODES, SINGLE, Calls, Loopback, run_group, soon

SIZES = (0, 1, 1000, 20_000, 600_001)  # the last one takes several segments a rank


@MODES
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_collective(mode: str, world_size: int) -> None:
    def program(comm: Communicator, calls: Calls) -> Any:
        n, rank = comm.world_size, comm.rank
        for size in SIZES:
            inputs = [random_floats(r, size) for r in range(n)]
            own = inputs[rank]
            x = own.clone()
            comm.all_reduce(x, SUM, calls("all_reduce"), soon())
            assert_is_sum(x, inputs)
            for root in {0, n - 1}:
                y = own.clone()
                comm.reduce(y, root, SUM, calls("reduce"), soon())
                if rank == root:
                    assert_is_sum(y, inputs)
                else:
                    assert torch.equal(y, own)
                y = own.clone()
                comm.broadcast(y, root, calls("broadcast"), soon())
                assert torch.equal(y, inputs[root])
                gathered = [torch.empty(size) for _ in range(n)] if rank == root else None
                comm.gather(gathered, own, root, calls("gather"), soon())
                assert gathered is None or all(map(torch.equal, gathered, inputs))
                comm.scatter(y, inputs if rank == root else None, root, calls("scatter"), soon())
                assert torch.equal(y, own)
            whole = torch.empty(n * size)
            comm.all_gather(whole, own, calls("all_gather"), soon())
            assert torch.equal(whole, torch.cat(inputs))
            ragged = [inputs[r][: size * r // n] for r in range(n)]
            outputs = [torch.empty_like(part) for part in ragged]
            comm.all_gather_v(outputs, ragged[rank], calls("all_gather"), soon())
            assert all(map(torch.equal, outputs, ragged))
            for operation in ("reduce_scatter", "reduce_scatter_tensor"):
                chunk, source = torch.empty(size), torch.cat([own] * n)
                comm.reduce_scatter(chunk, source, SUM, calls(operation), soon())
                assert_is_sum(chunk, inputs)
                assert torch.equal(source, torch.cat([own] * n)), "the input stays"
            sent = [size * (rank + r) % 7 for r in range(n)]
            swapped = torch.empty(sum(sent))
            comm.all_to_all(
                swapped, torch.full((sum(sent),), float(rank)), sent, sent, calls("a2a"), soon()
            )
            expected = [torch.full((sent[r],), float(r)) for r in range(n)]
            assert torch.equal(swapped, torch.cat(expected))
            comm.barrier(calls("barrier"), soon())
        return x

    results = run_group(mode, world_size, program)
    assert all(torch.equal(result, results[0]) for result in results)


@MODES
@pytest.mark.parametrize("size", [3, 30_000, 600_001])
def test_an_output_may_be_the_own_part_of_the_input(mode: str, size: int) -> None:
    """Also above the size up to which collectives work on copies of their tensors."""

    def program(comm: Communicator, calls: Calls) -> Any:
        n, rank = comm.world_size, comm.rank
        inputs = [random_floats(r, size) for r in range(n)]
        given = torch.cat([inputs[rank] * (part + 1) for part in range(n)])
        chunks = list(given.clone().chunk(n))
        whole = torch.cat(chunks)
        own = whole[rank * size : (rank + 1) * size]
        comm.reduce_scatter(own, whole, SUM, calls("reduce_scatter"), soon())
        assert_is_sum(own, [x * (rank + 1) for x in inputs])
        for part in {*range(n)} - {rank}:
            assert torch.equal(whole[part * size : (part + 1) * size], chunks[part])
        own.copy_(inputs[rank])
        comm.all_gather(whole, own, calls("all_gather"), soon())
        assert torch.equal(whole, torch.cat(inputs))
        rows = list(torch.full((n, size), -1.0))
        rows[rank].copy_(inputs[rank])
        comm.all_gather_v(rows, rows[rank], calls("all_gather"), soon())
        assert torch.equal(torch.cat(rows), torch.cat(inputs))
        gathered = list(torch.full((n, size), -1.0))
        gathered[rank].copy_(inputs[rank])
        on_root = rank == 1
        comm.gather(gathered if on_root else None, gathered[rank], 1, calls("gather"), soon())
        if on_root:
            assert torch.equal(torch.cat(gathered), torch.cat(inputs))
        comm.scatter(gathered[rank], gathered if on_root else None, 1, calls("scatter"), soon())
        assert torch.equal(gathered[rank], inputs[rank])

    run_group(mode, 3, program)


@MODES
@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.uint8])
def test_other_dtypes(mode: str, dtype: torch.dtype) -> None:
    def program(comm: Communicator, calls: Calls) -> Any:
        for size in (1, 5, 100_003):
            x = torch.full((size,), comm.rank + 1, dtype=dtype)
            comm.all_reduce(x, SUM, calls("all_reduce"), soon())
            assert x.unique().tolist() == [6]

    run_group(mode, 3, program)


def test_splits_that_do_not_fit_are_an_error_on_every_rank() -> None:
    def program(comm: Communicator, calls: Calls) -> Any:
        output = torch.zeros(6)
        wanted = [3, 1, 2] if comm.rank == 2 else [2, 2, 2]
        with pytest.raises(errors.CollectiveMismatch) as raised:
            comm.all_to_all(output, torch.ones(6), wanted, [2, 2, 2], calls("a2a"), soon())
        assert not output.any()
        return str(raised.value)

    for text in run_group("tcp", 3, program):
        assert "rank 0 sends 2 elements to rank 2, which expects 3" in text


@MODES
def test_splits_by_which_a_rank_contradicts_itself(mode: str) -> None:
    def program(comm: Communicator, calls: Calls) -> Any:
        wanted = [3, 1] if comm.rank == 1 else [2, 2]
        with pytest.raises(errors.CommunicationError) as raised:
            comm.all_to_all(torch.zeros(4), torch.ones(4), wanted, [2, 2], calls("a2a"), soon())
        return str(raised.value)

    told, contradicts = run_group(mode, 2, program)
    assert "rank 1 gives itself 2 elements, and expects 1" in contradicts
    assert mode == "gloo" or "rank 1 gives itself" in told


@MODES
@pytest.mark.parametrize(
    "options",
    [
        Loopback(interface="lo", hostname=None),
        Loopback(interface="lo,lo,lo", hostname=None),
        pytest.param(
            Loopback(hostname="::1"),
            marks=pytest.mark.skipif(
                not any(name == "lo" for _, _, name in devices._ipv6_addresses()),
                reason="this host has no IPv6",
            ),
        ),
    ],
    ids=["interface", "several interfaces", "IPv6"],
)
def test_interfaces_and_address_families(mode: str, options: Loopback) -> None:
    def program(comm: Communicator, calls: Calls) -> Any:
        for size in (1, 1000, 300_000):
            x = torch.ones(size)
            comm.all_reduce(x, SUM, calls("all_reduce"), soon())
            assert x.unique().tolist() == [3.0]
        for tag in range(4):
            right, left = (comm.rank + 1) % 3, (comm.rank - 1) % 3
            receive = comm.post_recv(x, left, tag, SINGLE, soon())
            comm.post_send(torch.ones(size), right, tag, SINGLE, soon()).wait(None)
            assert receive.wait(None)
            assert receive.error is None

    run_group(mode, 3, program, options)


def test_lazy_ranks_connect_when_they_need_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "1")

    def program(comm: Communicator, calls: Calls) -> Any:
        if comm.rank == 0:
            comm.post_send(torch.ones(2), 2, 0, SINGLE, soon()).wait(None)
        elif comm.rank == 2:
            x = torch.empty(2)
            assert comm.post_recv(x, ANY_SOURCE, 0, SINGLE, soon()).wait(None)
        y = torch.ones(5)
        comm.all_reduce(y, SUM, calls("all_reduce"), soon())
        return y[0].item()

    assert run_group("gloo", 3, program) == [3.0] * 3


@MODES
def test_many_small_collectives_in_a_row(mode: str) -> None:
    def program(comm: Communicator, calls: Calls) -> Any:
        seen: set[tuple[float, ...]] = set()
        for _ in range(300):
            x = torch.ones(3)
            comm.all_reduce(x, SUM, calls("all_reduce"), soon())
            seen.add(tuple(x.tolist()))
            comm.barrier(calls("barrier"), soon())
        return seen

    assert run_group(mode, 2, program) == [{(2.0, 2.0, 2.0)}] * 2

"""Groups over real sockets, in both modes: results, messages, devices, ends, leftovers."""

from __future__ import annotations

import os
import random
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from impl import errors
from impl.transport.base import ANY_SOURCE, Communicator
from impl.transport.meeting import interfaces as devices
from tests.impl.transport.combines import SUM, assert_is_sum, random_floats
from tests.impl.transport.ranks import (
    PATIENCE_S,
    SINGLE,
    Calls,
    Loopback,
    connected,
    run_group,
    run_ranks,
    soon,
)

MODES = pytest.mark.parametrize("mode", ["tcp", "gloo"])
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


@MODES
@pytest.mark.parametrize("size", [0, 3, 500_000])
def test_messages_between_all_pairs_in_all_orders(mode: str, size: int) -> None:
    def program(comm: Communicator, calls: Calls) -> Any:
        n, rank = comm.world_size, comm.rank
        others = [r for r in range(n) if r != rank]
        outgoing = [
            (to, tag, torch.full((size,), float(100 * rank + tag)))
            for to in others
            for tag in (0, 5, 1 << 31)
        ]
        incoming = {(src, tag): torch.empty(size) for src in others for tag in (0, 5, 1 << 31)}
        order = random.Random(rank)
        order.shuffle(outgoing)
        sends = [comm.post_send(x, to, tag, SINGLE, soon()) for to, tag, x in outgoing]
        keys = sorted(incoming)
        order.shuffle(keys)
        receives = {
            key: comm.post_recv(incoming[key], key[0], key[1], SINGLE, soon()) for key in keys
        }
        for (source, tag), transfer in receives.items():
            assert transfer.wait(None)
            assert transfer.error is None
            assert transfer.source == source
            expected = torch.full((size,), float(100 * source + tag))
            assert torch.equal(incoming[source, tag], expected)
        for send in sends:
            assert send.wait(None)
            assert send.error is None
        comm.barrier(calls("barrier"), soon())

    run_group(mode, 3, program)


@MODES
def test_a_transfer_progresses_while_nobody_waits(mode: str) -> None:
    """Large messages both ways, completed by the helper alone; callbacks come once."""

    def program(comm: Communicator, calls: Calls) -> Any:
        other = 1 - comm.rank
        x, y = torch.full((2_000_000,), float(comm.rank)), torch.empty(2_000_000)
        ended: list[str] = []
        both = threading.Semaphore(0)

        def note(name: str) -> None:
            ended.append(name)
            both.release()

        comm.post_send(x, other, 1, SINGLE, soon()).on_done(lambda: note("sent"))
        comm.post_recv(y, other, 1, SINGLE, soon()).on_done(lambda: note("received"))
        for _ in range(2):
            assert both.acquire(timeout=60)
        assert sorted(ended) == ["received", "sent"]
        assert y.unique().tolist() == [float(other)]
        comm.barrier(calls("barrier"), soon())

    run_group(mode, 2, program)


@MODES
def test_messages_from_several_threads_during_collectives(mode: str) -> None:
    def program(comm: Communicator, calls: Calls) -> Any:
        other = 1 - comm.rank
        errors_seen: list[BaseException] = []

        def chat(tag: int) -> None:
            try:
                for i in range(30):
                    y = torch.empty(100 * tag + 1)
                    send = comm.post_send(torch.full_like(y, i), other, tag, SINGLE, soon())
                    receive = comm.post_recv(y, other, tag, SINGLE, soon())
                    assert receive.wait(None)
                    assert receive.error is None
                    assert y.unique().tolist() == [float(i)]
                    assert send.wait(None)
            except BaseException as error:
                errors_seen.append(error)

        threads = [threading.Thread(target=chat, args=(tag,)) for tag in (1, 2, 700)]
        for thread in threads:
            thread.start()
        for i in range(60):
            x = torch.full(((1, 40_000)[i % 2],), 1.0)
            comm.all_reduce(x, SUM, calls("all_reduce"), soon())
            assert x.unique().tolist() == [2.0]
        for thread in threads:
            thread.join()
        assert not errors_seen, errors_seen
        comm.barrier(calls("barrier"), soon())

    run_group(mode, 2, program)


@MODES
def test_a_receive_from_anyone(mode: str) -> None:
    def program(comm: Communicator, calls: Calls) -> Any:
        seen = []
        if comm.rank == 0:
            for _ in range(4):
                x = torch.empty(1)
                transfer = comm.post_recv(x, ANY_SOURCE, 3, SINGLE, soon())
                assert transfer.wait(None)
                assert transfer.source == int(x)
                seen.append(transfer.source)
        else:
            for _ in range(2):
                send = comm.post_send(torch.tensor([float(comm.rank)]), 0, 3, SINGLE, soon())
                assert send.wait(None)
        comm.barrier(calls("barrier"), soon())
        return sorted(seen)

    assert run_group(mode, 3, program)[0] == [1, 1, 2, 2]


@MODES
def test_a_transfer_that_runs_out_of_time_fails_alone(mode: str) -> None:
    def program(comm: Communicator, calls: Calls) -> Any:
        if comm.rank == 0:
            late = comm.post_recv(torch.empty(3), 1, 9, SINGLE, soon(0.5))
            assert not late.wait(0.001)
            assert late.wait(None)
            assert isinstance(late.error, errors.CollectiveTimeout)
            assert "Timed out waiting 500ms" in str(late.error)
        x = torch.ones(1)
        comm.all_reduce(x, SUM, calls("all_reduce"), soon())
        return x.item()

    assert run_group(mode, 2, program) == [2.0, 2.0]


def test_gloo_has_no_messages_to_oneself() -> None:
    def program(comm: Communicator, calls: Calls) -> Any:
        with pytest.raises(ValueError, match="itself"):
            comm.post_send(torch.ones(1), comm.rank, 0, SINGLE, soon())

    run_group("gloo", 2, program)


def test_messages_to_oneself_keep_their_order_by_tag() -> None:
    def program(comm: Communicator, calls: Calls) -> Any:
        me = comm.rank
        early = torch.zeros(1)
        first = comm.post_recv(early, me, 0, SINGLE, soon())
        for value, tag in ((1.0, 0), (2.0, 1), (3.0, 0), (4.0, 0)):
            assert comm.post_send(torch.tensor([value]), me, tag, SINGLE, soon()).wait(None)
        assert first.wait(None) and first.source == me
        late = torch.zeros(3)
        for into, tag in ((late[0:1], 0), (late[1:2], 1), (late[2:3], 0)):
            assert comm.post_recv(into, me, tag, SINGLE, soon()).wait(None)
        return [*early.tolist(), *late.tolist()]

    assert run_group("tcp", 2, program) == [[1.0, 3.0, 2.0, 4.0]] * 2


def test_messages_to_oneself_that_cannot_end_well() -> None:
    def program(comm: Communicator, calls: Calls) -> Any:
        me = comm.rank
        late = comm.post_recv(torch.zeros(1), me, 0, SINGLE, soon(0.05))
        assert late.wait(None) and isinstance(late.error, errors.CollectiveTimeout)
        short = comm.post_recv(torch.zeros(1), me, 0, SINGLE, soon())
        comm.post_send(torch.zeros(2), me, 0, SINGLE, soon())
        assert short.wait(None) and isinstance(short.error, errors.CollectiveMismatch)
        waiting = comm.post_recv(torch.zeros(1), me, 0, SINGLE, soon())
        comm.abort("enough")
        assert waiting.wait(None) and isinstance(waiting.error, errors.Aborted)

    run_group("tcp", 1, program)


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


# Ends


@MODES
def test_an_abort_ends_what_waits_here_and_elsewhere(mode: str) -> None:
    def program(comm: Communicator, calls: Calls) -> Any:
        comm.barrier(calls("barrier"), soon())
        if comm.rank == 0:
            with pytest.raises(errors.CommunicationError) as caught:
                comm.barrier(calls("barrier"), soon())
            error: BaseException | None = caught.value
        else:
            pending = comm.post_recv(torch.ones(1), 0, 0, SINGLE, soon())
            threading.Timer(0.05, comm.abort, args=("enough is enough",)).start()
            assert pending.wait(None)
            error = pending.error
        assert error is not None
        with pytest.raises(type(error)):
            comm.post_send(torch.ones(1), 1 - comm.rank, 0, SINGLE, soon())
        return error

    first, second = run_group(mode, 2, program)
    assert isinstance(second, errors.Aborted)
    assert "enough is enough" in str(second)
    assert isinstance(first, errors.Aborted if mode == "tcp" else errors.PeerLost)


def test_a_timeout_names_the_ranks_that_have_not_come_and_ends_the_group_everywhere() -> None:
    release = threading.Event()

    def program(comm: Communicator, calls: Calls) -> Any:
        if comm.rank == 2:
            assert release.wait(60)
            with pytest.raises(errors.CollectiveTimeout, match="gave up"):
                comm.barrier(calls("barrier"), soon())
            return None
        try:
            with pytest.raises(errors.CollectiveTimeout) as caught:
                comm.barrier(calls("barrier"), soon(1.0 if comm.rank == 0 else 60))
        finally:
            release.set()
        return str(caught.value)

    first, second, _ = run_group("tcp", 3, program)
    assert "Timed out waiting 1000ms" in first
    assert "rank 2 has not joined" in first
    assert "rank 0 gave up" in second


def test_a_rank_that_never_comes_is_named() -> None:
    store = dist.HashStore()

    def rank_function(rank: int) -> str:
        with (
            pytest.raises(errors.CollectiveTimeout) as caught,
            connected("tcp", store, rank, 3, timeout_s=1.0),
        ):
            pass
        return str(caught.value)

    for text in run_ranks(2, rank_function):
        assert "rank 2 has not come" in text
        assert "Timed out waiting 1000ms" in text


def test_a_rank_that_cannot_join_is_told_to_the_others() -> None:
    store = dist.HashStore()

    def rank_function(rank: int) -> tuple[str, float]:
        began_s = time.monotonic()
        options = Loopback(interface="no such" if rank == 2 else None)
        with (
            pytest.raises(RuntimeError) as caught,
            connected("tcp", store, rank, 3, options),
        ):
            pass
        return str(caught.value), time.monotonic() - began_s

    *others, (its_own, _) = run_ranks(3, rank_function)
    assert "no such" in its_own
    for text, seconds in others:
        assert "another rank could not join: rank 2: " in text
        assert its_own in text
        assert seconds < PATIENCE_S / 2


def test_a_store_that_fails_is_reported() -> None:
    class Broken(dist.HashStore):
        def wait(self, *_: Any) -> None:
            raise ConnectionError("the store is gone")

    with (
        pytest.raises(errors.CommunicationError, match="the store is gone"),
        connected("tcp", Broken(), 0, 2),
    ):
        pass


@MODES
def test_nothing_is_left_behind(mode: str) -> None:
    run_group(mode, 2, lambda comm, calls: comm.barrier(calls("barrier"), soon()))
    descriptors, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(5):
        run_group(mode, 3, lambda comm, calls: comm.barrier(calls("barrier"), soon()))
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert threading.active_count() == threads


@MODES
def test_closing_waits_for_a_thread_that_waits_for_a_message(mode: str) -> None:
    def program(comm: Communicator, calls: Calls) -> Any:
        comm.barrier(calls("barrier"), soon())
        if comm.rank == 0:
            assert closed.wait(60)
            return
        seen: list[BaseException] = []

        def wait(tag: int) -> None:
            try:
                transfer = comm.post_recv(torch.ones(1), 0, tag, SINGLE, soon())
                posted.release()
                assert transfer.wait(None)
                assert isinstance(transfer.error, errors.Aborted)
            except BaseException as error:
                seen.append(error)

        waiting = [threading.Thread(target=wait, args=(tag,)) for tag in range(3)]
        for thread in waiting:
            thread.start()
        for _ in waiting:
            assert posted.acquire(timeout=60)
        comm.close()
        closed.set()
        for thread in waiting:
            thread.join(60)
        assert not seen, seen

    closed, posted = threading.Event(), threading.Semaphore(0)
    for _ in range(3):
        closed.clear()
        run_group(mode, 2, program)


@MODES
def test_closing_twice_and_using_a_closed_group(mode: str) -> None:
    def program(comm: Communicator, calls: Calls) -> Any:
        comm.barrier(calls("barrier"), soon())
        comm.close()
        comm.close()
        with pytest.raises(errors.Aborted, match="destroyed"):
            comm.barrier(calls("barrier"), soon())
        comm.abort("too late")

    run_group(mode, 2, program)


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

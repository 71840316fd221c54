"""Simulated groups: all collectives, bytes in any order, and all ways to end, from one seed."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from random import Random

import pytest
import torch
from torch import Tensor

from impl import errors
from impl.testing.faults import Cut, Freeze, Kill
from impl.testing.network import CALM, Weather
from impl.testing.simulated_rank import Program, SimulatedRank
from impl.testing.simulation import (
    FaultNeverFired,
    Killed,
    Raised,
    Returned,
    Simulation,
    Stuck,
    values,
)
from impl.transport.base import ANY_SOURCE
from tests.impl.transport.combines import SUM, assert_is_sum, random_floats

MODES = ("tcp", "gloo")
SIZES = (0, 1, 5, 1000, 17_000)  # the largest is neither staged nor eager


def sizes_for(world_size: int) -> tuple[int, ...]:
    """Fewer for large worlds: the number of messages grows with its square."""
    if world_size <= 4:
        return SIZES
    return (0, 5, 1000) if world_size < 16 else (5,)


def every_collective(me: SimulatedRank) -> Program:
    """Checks the results against what one process computes."""
    n = me.world_size
    for size in sizes_for(n):
        inputs = [random_floats(rank, size) for rank in range(n)]
        for root in {0, n - 1}:
            x = inputs[me.rank].clone()
            yield from me.reduce(x, root, SUM)
            if me.rank == root:
                assert_is_sum(x, inputs)
            else:
                assert torch.equal(x, inputs[me.rank]), "only the root's tensor changes"
            x = inputs[me.rank].clone()
            yield from me.broadcast(x, root)
            assert torch.equal(x, inputs[root])
            outputs = [torch.empty(size) for _ in range(n)] if me.rank == root else None
            yield from me.gather(outputs, inputs[me.rank], root)
            if outputs is not None:
                assert all(map(torch.equal, outputs, inputs))
            x = torch.empty(size)
            yield from me.scatter(x, inputs if me.rank == root else None, root)
            assert torch.equal(x, inputs[me.rank])
        gathered = torch.empty(n * size)
        yield from me.all_gather(gathered, inputs[me.rank])
        assert torch.equal(gathered, torch.cat(inputs))
        ragged = [inputs[rank][: size * rank // n] for rank in range(n)]
        outputs = [torch.empty_like(part) for part in ragged]
        yield from me.all_gather_v(outputs, ragged[me.rank])
        assert all(map(torch.equal, outputs, ragged))
        whole = torch.cat([random_floats(100 + me.rank, size)] * n)
        chunk = torch.empty(size)
        yield from me.reduce_scatter(chunk, whole, SUM)
        assert_is_sum(chunk, [random_floats(100 + rank, size) for rank in range(n)])
        yield from exchange_parts(me, size)
        x = inputs[me.rank].clone()
        yield from me.all_reduce(x, SUM)
        assert_is_sum(x, inputs)
        yield from me.barrier()
    return x


def exchange_parts(me: SimulatedRank, size: int) -> Program:
    n = me.world_size
    parts = {
        (s, d): random_floats(s * n + d, (size + s + 2 * d) % 97)
        for s in range(n)
        for d in range(n)
    }
    sent = [parts[me.rank, d] for d in range(n)]
    wanted = [parts[s, me.rank] for s in range(n)]
    output = torch.empty(sum(map(torch.numel, wanted)))
    yield from me.all_to_all(
        output, torch.cat(sent), [p.numel() for p in wanted], [p.numel() for p in sent]
    )
    assert torch.equal(output, torch.cat(wanted))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 7, 8, 13, 16, 17, 32])
def test_every_collective_gives_the_right_result_and_the_same_bits(
    mode: str, world_size: int
) -> None:
    results = values(Simulation(world_size, seed=world_size, mode=mode).run(every_collective))
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(6))
def test_no_order_of_bytes_changes_a_result(mode: str, seed: int) -> None:
    weather = Weather(capacity_nbytes=(100, 5_000, 1 << 20)[seed % 3], partial=(0.0, 0.9)[seed % 2])
    simulation = Simulation(3, seed=seed, mode=mode, weather=weather, device_count=1 + seed % 2)
    results = values(simulation.run(small_program))
    assert all(map(torch.equal, results, in_calm_weather(mode)))


@functools.cache
def in_calm_weather(mode: str) -> list[Tensor]:
    return values(Simulation(3, seed=0, mode=mode, weather=CALM).run(small_program))


def small_program(me: SimulatedRank) -> Program:
    x = random_floats(me.rank, 10_000)
    yield from me.all_reduce(x, SUM)
    yield from me.broadcast(x, 1)
    right, left = (me.rank + 1) % me.world_size, (me.rank - 1) % me.world_size
    sends = [me.post_send(x * tag, right, tag) for tag in range(4)]
    for tag in reversed(range(4)):
        y = torch.empty_like(x)
        yield from me.receive(y, left, tag)
        assert torch.equal(y, x * tag)
    for send in sends:
        yield from me.wait(send)
    yield from me.all_reduce(x, SUM)
    return x


def test_a_seed_decides_everything() -> None:
    def run(seed: int) -> tuple[float, list[int]]:
        simulation = Simulation(4, seed=seed)
        values(simulation.run(small_program))
        return simulation.clock.now(), [p.events for p in simulation._processes]

    assert run(5) == run(5)
    assert run(5) != run(6)


# Messages between two ranks


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("numel", [0, 3, 100_000])
def test_messages_of_one_source_and_tag_arrive_in_order(mode: str, numel: int) -> None:
    def program(me: SimulatedRank) -> Program:
        got = []
        if me.rank == 0:
            for i in range(5):
                yield from me.send(torch.full((numel,), float(i)), 1, tag=7)
        else:
            for _ in range(5):
                x = torch.empty(numel)
                source = yield from me.receive(x, 0, tag=7)
                got.append((source, x.unique().tolist()))
        return got

    for seed in range(5):
        outcome = values(Simulation(2, seed=seed, mode=mode).run(program))
        assert outcome[1] == [(0, [float(i)] if numel else []) for i in range(5)]


@pytest.mark.parametrize("mode", MODES)
def test_two_ranks_may_send_large_messages_to_each_other_before_either_receives(mode: str) -> None:
    def program(me: SimulatedRank) -> Program:
        other = 1 - me.rank
        send = me.post_send(torch.full((200_000,), float(me.rank)), other)
        x = torch.empty(200_000)
        yield from me.receive(x, other)
        yield from me.wait(send)
        return x[0].item()

    assert values(Simulation(2, seed=1, mode=mode).run(program)) == [1.0, 0.0]


@pytest.mark.parametrize("mode", MODES)
def test_a_receive_from_anyone_takes_each_message_once(mode: str) -> None:
    def program(me: SimulatedRank) -> Program:
        if me.rank > 0:
            for i in range(3):
                yield from me.send(torch.tensor([me.rank, i]), 0, tag=1)
            return None
        seen = []
        for i in range(9):
            x = torch.empty(2, dtype=torch.int64)
            # a receive from one rank in between must not be starved or robbed
            source = yield from me.receive(x, 2 if i == 2 else ANY_SOURCE, tag=1)
            assert x[0] == source
            seen.append((source, int(x[1])))
        return seen

    for seed in range(10):
        seen = values(Simulation(4, seed=seed, mode=mode).run(program))[0]
        assert sorted(seen) == [(source, i) for source in (1, 2, 3) for i in range(3)]
        for source in (1, 2, 3):
            assert [i for s, i in seen if s == source] == [0, 1, 2]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("sent", "wanted"), [(4, 8), (8, 4), (100_000, 4), (4, 100_000)])
def test_a_message_of_another_size_fails_alone(mode: str, sent: int, wanted: int) -> None:
    def program(me: SimulatedRank) -> Program:
        failed = False
        try:
            if me.rank == 0:
                yield from me.send(torch.zeros(sent), 1)
            else:
                yield from me.receive(torch.zeros(wanted), 0)
        except errors.CollectiveMismatch:
            failed = True
        # the group goes on
        x = torch.ones(1)
        if me.rank == 0:
            yield from me.send(x, 1, tag=3)
        else:
            yield from me.receive(x, 0, tag=3)
        return failed

    for seed in range(3):
        outcome = values(Simulation(2, seed=seed, mode=mode).run(program))
        assert outcome[1], "the receiver hears of it"
        if mode == "gloo" or sent > 10_000:
            assert outcome[0], "and so does a sender that has not sent yet"


@pytest.mark.parametrize("mode", MODES)
def test_a_receive_that_runs_out_of_time_fails_alone_and_loses_no_message(mode: str) -> None:
    def program(me: SimulatedRank) -> Program:
        x = torch.zeros(50_000)
        if me.rank == 0:
            yield from me.sleep(2.0)
            yield from me.send(x + 1, 1)
            return None
        late = me.post_receive(torch.full((50_000,), -1.0), 0)
        with pytest.raises(errors.CollectiveTimeout, match="Timed out waiting 1000ms"):
            yield from me.wait(late, timeout_s=1.0)
        yield from me.receive(x, 0)
        return x.unique().tolist()

    assert values(Simulation(2, seed=4, mode=mode).run(program))[1] == [1.0]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(6))
def test_receives_that_run_out_of_time_lose_no_message_and_keep_the_order(
    mode: str, seed: int
) -> None:
    count, numel = 10, (3, 9_000)[seed % 2]
    random = Random(seed)

    def program(me: SimulatedRank) -> Program:
        if me.rank > 0:
            for i in range(count):
                yield from me.send(torch.full((numel,), float(i)), 0, tag=1)
            return None
        seen: dict[int, list[float]] = {1: [], 2: []}
        for _ in range(300):
            tensors = [torch.empty(numel) for _ in range(3)]
            posted = [me.post_receive(x, ANY_SOURCE, tag=1) for x in tensors]
            for message in random.sample(posted, 3):
                with contextlib.suppress(errors.CollectiveTimeout):
                    yield from me.wait(message, timeout_s=random.choice([1e-4, 2e-3]))
            for message, x in zip(posted, tensors, strict=True):
                if message.error is None:
                    seen[message.peer] += x.unique().tolist()
        return seen

    seen = values(Simulation(3, seed=seed, mode=mode).run(program))[0]
    assert seen == {peer: [float(i) for i in range(count)] for peer in (1, 2)}


@pytest.mark.parametrize("mode", MODES)
def test_a_send_that_runs_out_of_time_may_still_arrive(mode: str) -> None:
    def program(me: SimulatedRank) -> Program:
        if me.rank == 0:
            x = torch.full((50_000,), 3.0)
            with pytest.raises(errors.CollectiveTimeout):
                yield from me.wait(me.post_send(x, 1), timeout_s=1.0)
            x.fill_(-1)  # the memory is the caller's again
            yield from me.sleep(5.0)
            return None
        yield from me.sleep(2.0)
        y = torch.empty(50_000)
        yield from me.receive(y, 0)
        return y.unique().tolist()

    assert values(Simulation(2, seed=4, mode=mode).run(program))[1] == [3.0]


def test_sends_beyond_the_window_wait_for_their_receives() -> None:
    count = 3000  # of 1 KiB: three times what a receiver keeps for a peer

    def program(me: SimulatedRank) -> Program:
        if me.rank == 0:
            sends = [me.post_send(torch.full((256,), float(i)), 1) for i in range(count)]
            pending = sum(not send.done for send in sends)
            x = torch.ones(1)
            yield from me.all_reduce(x, SUM)  # collectives have room of their own
            for send in sends:
                yield from me.wait(send)
            return pending
        x = torch.ones(1)
        yield from me.all_reduce(x, SUM)
        for i in range(count):
            y = torch.empty(256)
            yield from me.receive(y, 0)
            assert y[0] == i
        return 0

    pending = values(Simulation(2, seed=1, weather=CALM).run(program))[0]
    assert 0 < pending < count


# How groups end


def losing(me: SimulatedRank) -> Program:
    for i in range(20):
        x = random_floats(me.rank, (5, 30_000)[i % 2])
        yield from me.all_reduce(x, SUM)
        yield from me.broadcast(x, i % me.world_size)
    return None


@pytest.mark.parametrize("world_size", [2, 3, 5, 17])
@pytest.mark.parametrize("after", [0, 3, 10, 40, 100])
def test_every_rank_hears_of_a_lost_one(world_size: int, after: int) -> None:
    simulation = Simulation(
        world_size, seed=after, faults=[Kill(rank=world_size - 1, after_events=after)]
    )
    outcomes = simulation.run(losing)
    assert isinstance(outcomes[-1], Killed)
    for outcome in outcomes[:-1]:
        assert isinstance(outcome, Raised)
        assert isinstance(outcome.error, errors.PeerLost)
        assert f"rank {world_size - 1}" in str(outcome.error)
    assert simulation.clock.now() < 2.0


def test_every_rank_hears_of_a_broken_connection_between_two_living_ranks() -> None:
    for seed in range(5):
        simulation = Simulation(5, seed=seed, faults=[Cut(rank=1, other=3, after_events=20)])
        for outcome in simulation.run(losing):
            assert isinstance(outcome, Raised)
            assert isinstance(outcome.error, errors.PeerLost)
        assert simulation.clock.now() < 2.0


def test_a_frozen_rank_is_named_when_the_time_is_up() -> None:
    simulation = Simulation(4, seed=2, faults=[Freeze(rank=2, after_events=30)])
    outcomes = simulation.run(losing)
    for rank in (0, 1, 3):
        outcome = outcomes[rank]
        assert isinstance(outcome, Raised)
        assert isinstance(outcome.error, errors.CollectiveTimeout)
        assert "30000ms" in str(outcome.error)
        assert "rank 2 " in str(outcome.error)


def test_a_timeout_in_a_large_world_calls_nobody_absent_who_owes_nothing() -> None:
    def program(me: SimulatedRank) -> Program:
        if me.rank == 14:
            yield from me.sleep(10.0)
        else:
            yield from me.barrier(timeout_s=5.0)

    outcomes = Simulation(17, seed=1).run(program)
    for rank in (13, 15, 16):  # whom rank 14 owes the first message, or who waited for them
        outcome = outcomes[rank]
        assert isinstance(outcome, Raised)
        assert "rank 14 did not send or receive what was due" in str(outcome.error)


def test_gloo_mode_notices_a_lost_neighbour() -> None:
    outcomes = Simulation(3, seed=1, mode="gloo", faults=[Kill(2, after_events=25)]).run(losing)
    for outcome in outcomes[:2]:
        assert isinstance(outcome, Raised)
        assert isinstance(outcome.error, errors.PeerLost)


def test_an_abort_ends_the_group_everywhere() -> None:
    def program(me: SimulatedRank) -> Program:
        if me.rank == 1:
            yield from me.sleep(0.5)
            me.abort("enough")
        yield from me.barrier()

    for outcome in Simulation(4, seed=3).run(program):
        assert isinstance(outcome, Raised)
        assert isinstance(outcome.error, errors.Aborted)
        assert "enough" in str(outcome.error)


def test_a_rank_may_leave_while_others_finish_what_does_not_need_it() -> None:
    def program(me: SimulatedRank) -> Program:
        x = torch.ones(3)
        yield from me.all_reduce(x, SUM)
        if me.rank == 0:
            yield from me.send(x, 1)
            me.leave()
            return "left"
        yield from me.sleep(1.0)
        y = torch.empty(3)
        if me.rank == 1:
            yield from me.receive(y, 0)  # it came before its sender left
            yield from me.send(y, 2)
        else:
            yield from me.receive(y, 1)
        return y.tolist()

    for seed in range(5):
        outcomes = values(Simulation(3, seed=seed).run(program))
        assert outcomes == ["left", [3.0] * 3, [3.0] * 3]


def test_a_collective_after_a_rank_has_left_names_it() -> None:
    def program(me: SimulatedRank) -> Program:
        yield from me.barrier()
        if me.rank == 0:
            me.leave()
            return
        yield from me.barrier()

    for seed in range(5):
        outcomes = Simulation(3, seed=seed).run(program)
        assert isinstance(outcomes[0], Returned)
        for outcome in outcomes[1:]:
            assert isinstance(outcome, Raised)
            assert isinstance(outcome.error, errors.PeerLost)
            assert "lost rank 0" in str(outcome.error)
            assert "left the group" in str(outcome.error)


# Ranks that disagree

Call = Callable[[SimulatedRank, Tensor], Program]


def reduce_floats(me: SimulatedRank, x: Tensor) -> Program:
    yield from me.all_reduce(x, SUM)


def reduce_more(me: SimulatedRank, x: Tensor) -> Program:
    yield from me.all_reduce(torch.cat([x, x]), SUM)


def broadcast(me: SimulatedRank, x: Tensor) -> Program:
    yield from me.broadcast(x, 0)


def broadcast_from_1(me: SimulatedRank, x: Tensor) -> Program:
    yield from me.broadcast(x, 1)


@pytest.mark.parametrize("world_size", [2, 3, 5, 17])
@pytest.mark.parametrize("numel", [1, 4, 9_000, 30_000])
@pytest.mark.parametrize(
    ("usual", "odd", "what"),
    [
        (reduce_floats, reduce_more, "numel"),
        (reduce_floats, broadcast, "the operation"),
        (broadcast, broadcast_from_1, "root"),
    ],
)
def test_every_rank_hears_what_all_have_called_and_no_tensor_changes(
    world_size: int, numel: int, usual: Call, odd: Call, what: str
) -> None:
    dissenter = world_size // 2

    def program(me: SimulatedRank) -> Program:
        x = random_floats(me.rank, numel)
        before = x.clone()
        yield from me.barrier()
        try:
            yield from (odd if me.rank == dissenter else usual)(me, x)
        except errors.CollectiveMismatch as error:
            assert torch.equal(x, before)
            return str(error)
        raise AssertionError("it must not succeed")

    tables = values(Simulation(world_size, seed=numel).run(program))
    for table in tables:
        assert f"ranks disagree on {what}." in table
        assert table.count("rank ") >= world_size
        if world_size > 2:
            (marked,) = [line for line in table.splitlines() if "<- differs" in line]
            assert marked.startswith(f"  rank {dissenter} ")


def test_a_dispute_is_settled_without_a_rank_that_never_calls() -> None:
    def program(me: SimulatedRank) -> Program:
        if me.rank == 2:
            yield from me.sleep(10.0)
            return None
        x = torch.ones(3)
        try:
            yield from (reduce_floats if me.rank == 0 else broadcast)(me, x)
        except errors.CollectiveMismatch as error:
            return str(error)

    first, second, _ = values(Simulation(3, seed=1).run(program))
    assert "(nothing yet)" in first
    assert "(nothing yet)" in second


# The simulation itself


def test_a_deadlock_is_not_waited_for() -> None:
    def program(me: SimulatedRank) -> Program:
        message = me.post_receive(torch.empty(1), 1 - me.rank)
        yield from me.wait(message, timeout_s=1e9)

    outcomes = Simulation(2, seed=0).run(program)
    assert all(isinstance(o, Raised) for o in outcomes)


def test_it_says_when_nothing_can_happen_any_more() -> None:
    simulation = Simulation(2, seed=0)
    simulation.clock.jump = lambda: False  # type: ignore[method-assign]  # time stands still
    with pytest.raises(Stuck, match=r"ranks \[0, 1\]"):
        simulation.run(losing)


def test_a_fault_that_never_fires_is_an_error() -> None:
    with pytest.raises(FaultNeverFired):
        Simulation(2, seed=0, faults=[Kill(1, after_events=10**6)]).run(small_program)

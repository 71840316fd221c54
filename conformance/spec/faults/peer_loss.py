"""A rank dies, and the other ranks get errors and can continue without it.

None of these cases is probed: a target that does not notice the loss of a rank waits for it.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
from collections.abc import Callable
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from conformance import (
    Chapter,
    Me,
    Ranks,
    adapts,
    assert_each_rank,
    assert_that,
    covers,
    deadline,
    loses_ranks,
    needs,
    not_probed,
    world_sizes,
)
from conformance.harness.failure import RanksFailed
from conformance.harness.leaks import find_leaks, take_census
from conformance.harness.outcome import Outcome, Returned
from conformance.spec.faults.operations import ALL_NEEDED, AS_PARAMETERS, OPERATIONS
from conformance.spec.groups.membership_sums import mark, sum_marks, sum_of_marks
from conformance.spec.groups.starting import start
from conformance.spec.raising import assert_raised, returned

chapter = Chapter("faults", source="observed, torch 2.13.0 gloo", needs="feature:peer_loss")

pytestmark = [loses_ranks(), not_probed()]

# How often the ranks that are left repeat an operation: one that only sends, and little, may well
# go through a few times.
_ROUNDS = 60


def die(how: str) -> NoReturn:
    """End this process without telling any other rank."""
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(0 if how == "exit code 0" else 7)


def keep_reducing(me: Me, group: dist.ProcessGroup | None = None) -> None:
    """Until it raises, or has gone through often enough."""
    for _ in range(_ROUNDS):
        dist.all_reduce(mark(me), group=group)


def lose_the_last_rank(me: Me, name: str) -> None:
    """Twice all together; then the last rank is killed, and the others carry on."""
    operation = OPERATIONS[name]
    for _ in range(2):
        operation(me)
    if me.rank == me.world_size - 1:
        die("killed")
    for _ in range(_ROUNDS):
        operation(me)


@chapter.must(
    "peer_loss/of-a-pair",
    "If one of two ranks dies, the other gets a RuntimeError soon after, whatever operation it "
    "is in or starts: it neither hangs nor continues with wrong data.",
    rests_on="all_reduce/sum",
)
@world_sizes(2)
@deadline(10)
@pytest.mark.parametrize("name", AS_PARAMETERS)
def test_the_other_of_two_finds_out(ranks: Ranks, name: str) -> None:
    outcomes = ranks.outcomes(lose_the_last_rank, name)
    assert_raised(outcomes, RuntimeError, but={1})


def lose_the_last_rank_in_all_groups(me: Me) -> list[str]:
    """Every kind of collective goes on in a group and a thread of its own when the last rank is
    killed. Returns the kinds that went on as if nothing had happened."""
    groups = {name: dist.new_group() for name in OPERATIONS}
    for name, operation in OPERATIONS.items():
        operation(me, groups[name])
    me.store.set(f"rank {me.rank} is about to begin", "1")
    if me.rank == me.world_size - 1:
        me.store.wait([f"rank {rank} is about to begin" for rank in range(me.world_size)])
        die("killed")
    went_on: list[str] = []

    def carry_on(name: str) -> None:
        try:
            for _ in range(_ROUNDS):
                OPERATIONS[name](me, groups[name])
        except RuntimeError:
            return
        went_on.append(name)

    threads = [threading.Thread(target=carry_on, args=(name,)) for name in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return went_on


@chapter.must(
    "peer_loss/every-rank",
    "In a larger group, every remaining rank gets a RuntimeError soon after a rank has died, "
    "whether or not it communicates with the dead one.",
    source="derived: Gloo tells the neighbours of a dead rank alone, the others wait for the "
    "timeout",
    rests_on="peer_loss/of-a-pair",
)
@world_sizes(3, 4)
@deadline(6)
@needs(*ALL_NEEDED)
def test_all_others_find_out(ranks: Ranks) -> None:
    *outcomes, _ = ranks.outcomes(lose_the_last_rank_in_all_groups)
    if not all(isinstance(outcome, Returned) for outcome in outcomes):
        raise RanksFailed("losing a rank in every kind of collective", outcomes)
    for rank, outcome in enumerate(outcomes):
        assert isinstance(outcome, Returned)
        assert_that(not outcome.value, f"{outcome.value} went on after the loss", rank)


def lose_a_rank_in_the_middle(me: Me, victim: int) -> None:
    """The victim has issued a large reduction when it dies, and the others wait for it."""
    x = torch.ones(1 << 21, device=me.device)
    dist.all_reduce(x)
    work = dist.all_reduce(x, async_op=True)
    if me.rank == victim:
        die("killed")
    work.wait()
    dist.barrier()
    dist.all_reduce(x)


@covers("peer_loss/every-rank")
@world_sizes(3, 4)
@deadline(6)
@needs("op:barrier")
def test_all_others_find_out_in_the_middle(ranks: Ranks) -> None:
    for victim in (0, 1):
        outcomes = ranks.outcomes(lose_a_rank_in_the_middle, victim)
        assert_raised(outcomes, RuntimeError, but={victim}, what=f"rank {victim} killed")


def _exchange(me: Me, how: str) -> None:
    """What rank 0 does with rank 1, and rank 1 does not do with rank 0."""
    x = torch.ones(1 << 20, device=me.device)
    calls: dict[str, Callable[[], object]] = {
        "recv": lambda: dist.recv(x, 1),
        "send": lambda: [dist.send(x, 1) for _ in range(_ROUNDS)],
        "recv from anybody": lambda: dist.recv(x),
        "batch": lambda: [
            work.wait() for work in dist.batch_isend_irecv([dist.P2POp(dist.irecv, x, 1)])
        ],
    }
    calls[how]()


def lose_a_partner(me: Me, how: str) -> None:
    """Rank 1 is killed while rank 0 waits, or is about to."""
    if me.rank == 1:
        me.store.wait(["rank 0 is ready"])
        die("killed")
    me.store.set("rank 0 is ready", "1")
    _exchange(me, how)


@chapter.must(
    "peer_loss/point-to-point",
    "A send to a dead rank raises, and so does a receive from it.",
    rests_on="p2p/delivers",
)
@world_sizes(2)
@deadline(10)
@pytest.mark.parametrize("how", ["recv", "send", "batch"])
def test_messages_to_and_from_a_dead_rank(ranks: Ranks, how: str) -> None:
    assert_raised(ranks.outcomes(lose_a_partner, how), RuntimeError, but={1})


@chapter.must(
    "peer_loss/from-anybody",
    "A receive without a source raises once every rank that could send has died.",
    source="derived: torch 2.13.0 gloo waits for the timeout",
    needs=("feature:peer_loss", "feature:any_source"),
    rests_on="p2p/any-source",
)
@world_sizes(2)
@deadline(5)
def test_messages_from_anybody_when_nobody_is_left(ranks: Ranks) -> None:
    assert_raised(ranks.outcomes(lose_a_partner, "recv from anybody"), RuntimeError, but={1})


def lose_a_rank_somehow(me: Me, how: str) -> None:
    """Rank 1 goes while rank 0 waits in an all_reduce."""
    dist.all_reduce(mark(me))
    if me.rank == 1 and how == "destroyed its groups":
        dist.destroy_process_group()
        me.store.wait(["rank 0 has found out"])
        return
    if me.rank == 1:
        die(how)
    try:
        keep_reducing(me)
    finally:
        me.store.set("rank 0 has found out", "1")


@chapter.must(
    "peer_loss/however-it-died",
    "The loss of a rank is noticed whether it was killed, ended with any exit code, or destroyed "
    "its groups and lives on.",
    source="derived",
    rests_on="peer_loss/of-a-pair",
)
@world_sizes(2)
@deadline(10)
@pytest.mark.parametrize("how", ["killed", "exit code 0", "exit code 7", "destroyed its groups"])
def test_it_does_not_matter_how_a_rank_died(ranks: Ranks, how: str) -> None:
    outcomes = ranks.outcomes(lose_a_rank_somehow, how)
    assert_raised(outcomes, RuntimeError, but={1})
    if how == "destroyed its groups":
        returned(outcomes, how, but={0})


def ask_a_handle_after_a_loss(me: Me) -> list[Any]:
    """What rank 0's handle says of an all_reduce that rank 1 died in."""
    if me.rank == 1:
        me.store.wait(["rank 0 has issued it"])
        die("killed")
    work = dist.all_reduce(mark(me), async_op=True)
    me.store.set("rank 0 has issued it", "1")
    for _ in range(2):
        with pytest.raises(RuntimeError):
            work.wait()
    with pytest.raises(RuntimeError):
        work.get_future().wait()
    return [work.is_completed(), work.is_success(), isinstance(work.exception(), Exception)]


def _of_rank_0(outcomes: list[Outcome], what: str) -> Any:
    """What rank 0 returned; rank 1 died on purpose."""
    [value] = returned(outcomes, what, but=range(1, len(outcomes)))
    return value


@chapter.must(
    "peer_loss/handle-knows",
    "wait on the handle of an operation that a dead rank took part in raises each time; the "
    "handle is completed, not successful, and has the exception, and so has its future.",
    source="derived: wait reported success of an operation that had failed",
    rests_on="peer_loss/of-a-pair",
)
@world_sizes(2)
@deadline(10)
def test_a_handle_knows_that_its_operation_failed(ranks: Ranks) -> None:
    said = _of_rank_0(ranks.outcomes(ask_a_handle_after_a_loss), "asking a handle after a loss")
    assert_each_rank([said], [[True, False, True]], what="is_completed, is_success, has exception")


def carry_on_regardless(me: Me) -> list[str]:
    """Operations that rank 0 tries after it has found out, and that went through."""
    if me.rank == 1:
        die("killed")
    with pytest.raises(RuntimeError):
        keep_reducing(me)
    went_through = []
    for name in ("all_reduce", "barrier", "broadcast", "all_reduce"):
        try:
            for _ in range(_ROUNDS):
                OPERATIONS[name](me)
        except RuntimeError:
            continue
        went_through.append(name)
    return went_through


@chapter.must(
    "peer_loss/stays-broken",
    "Every later operation of a group that has lost a rank raises too.",
    rests_on="peer_loss/of-a-pair",
)
@world_sizes(2)
@deadline(10)
@needs("op:broadcast", "op:barrier")
def test_a_group_that_lost_a_rank_stays_broken(ranks: Ranks) -> None:
    went_through = _of_rank_0(ranks.outcomes(carry_on_regardless), "carrying on after a loss")
    assert_that(not went_through, f"after the loss {went_through} went through", 0)


def use_a_group_without_the_dead(me: Me) -> list[Tensor]:
    """Ranks 0 and 1 have a group of their own when rank 2 dies.

    If the target notices that, they have found out before they use it.
    """
    pair = dist.new_group([0, 1])
    if me.rank == 2:
        me.store.set("rank 2 is about to die", "1")
        die("killed")
    me.store.wait(["rank 2 is about to die"])
    if not me.target.lacks(("feature:peer_loss",)):
        with contextlib.suppress(RuntimeError):
            keep_reducing(me)
    return [sum_marks(me, pair) for _ in range(3)]


@chapter.must(
    "peer_loss/other-groups-live",
    "A group that the dead rank was not a member of keeps working.",
    needs=("op:all_reduce", "reduce_op:sum"),
    rests_on="new_group/members",
)
@adapts()
@world_sizes(3)
@deadline(10)
def test_groups_without_the_dead_rank_live_on(ranks: Ranks) -> None:
    *outcomes, _ = ranks.outcomes(use_a_group_without_the_dead)
    if not all(isinstance(outcome, Returned) for outcome in outcomes):
        raise RanksFailed("using a group that the dead rank was not in", outcomes)
    got = [outcome.value for outcome in outcomes if isinstance(outcome, Returned)]
    assert_each_rank(got, [[sum_of_marks([0, 1])] * 3] * 2)


def clean_up_after_a_loss(me: Me) -> tuple[str, ...]:
    """What rank 0 still holds when it has destroyed everything."""
    before = take_census()
    start(me, "with a rank that dies")
    group = dist.new_group()
    sum_marks(me, group)
    if me.rank == 1:
        die("killed")
    work = dist.all_reduce(torch.ones(1 << 20, device=me.device), async_op=True)
    with pytest.raises(RuntimeError):
        keep_reducing(me, group)
    dist.destroy_process_group()
    del group, work
    gc.collect()
    return find_leaks(before)


@chapter.must(
    "peer_loss/destroy",
    "destroy_process_group returns although a rank has died, and leaves no thread, descriptor "
    "or shared memory.",
    source="torch 2.13 docs, destroy_process_group",
    rests_on=("peer_loss/of-a-pair", "groups/leaves-nothing-behind"),
)
@world_sizes(2)
@deadline(15)
def test_groups_with_a_dead_rank_are_destroyed(bare_ranks: Ranks) -> None:
    left = _of_rank_0(bare_ranks.outcomes(clean_up_after_a_loss), "cleaning up after a loss")
    assert_that(not left, f"rank 0 still holds {', '.join(left)}", 0)


def go_on_without_the_dead(me: Me) -> list[Any]:
    """The last rank dies; the others make a world of their own, numbered backwards."""
    n = me.world_size
    start(me, "all")
    sum_marks(me)
    if me.rank == n - 1:
        die("killed")
    with pytest.raises(RuntimeError):
        keep_reducing(me)
    dist.destroy_process_group()
    start(me, "those that are left", rank=n - 2 - me.rank, world_size=n - 1)
    told = mark(me)
    dist.broadcast(told, 0)
    return [sum_marks(me), told, dist.get_rank()]


def _survivors_go_on(ranks: Ranks) -> None:
    n = ranks.world_size
    *outcomes, _ = ranks.outcomes(go_on_without_the_dead)
    if not all(isinstance(outcome, Returned) for outcome in outcomes):
        raise RanksFailed("making a new group after a loss", outcomes)
    got = [outcome.value for outcome in outcomes if isinstance(outcome, Returned)]
    total, told = sum_of_marks(range(n - 1)), sum_of_marks([n - 2])
    assert_each_rank(got, [[total, told, n - 2 - rank] for rank in range(n - 1)])


@chapter.must(
    "peer_loss/survivors-go-on",
    "The remaining ranks can destroy everything and make a new default group without the dead "
    "rank.",
    source="torch elastic, restarts",
    rests_on=("peer_loss/of-a-pair", "init/again-with-fewer-ranks"),
)
@world_sizes(2, 3)
@deadline(15)
@needs("op:broadcast")
def test_the_ranks_that_are_left_make_a_new_group(bare_ranks: Ranks) -> None:
    _survivors_go_on(bare_ranks)


@chapter.must(
    "peer_loss/all-survivors-go-on",
    "In a larger group, too, all remaining ranks find out by themselves and make a new default "
    "group.",
    source="torch elastic, restarts",
    rests_on=("peer_loss/every-rank", "peer_loss/survivors-go-on"),
)
@world_sizes(4, 5)
@deadline(6)
@needs("op:broadcast")
def test_all_ranks_that_are_left_make_a_new_group(bare_ranks: Ranks) -> None:
    _survivors_go_on(bare_ranks)

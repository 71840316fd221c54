"""destroy_process_group: what is freed, other groups, callbacks; and making groups again."""

from __future__ import annotations

import contextlib
import functools
import gc
import threading
import time
import weakref
from datetime import timedelta
from typing import Any

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
    covers,
    deadline,
    needs,
    world_sizes,
)
from conformance.harness.leaks import find_leaks, still_alive, take_census
from conformance.spec.collectives.store_sync import appears
from conformance.spec.groups.membership_sums import mark, sum_marks, sum_of_marks
from conformance.spec.groups.starting import start
from conformance.spec.groups.stores import tcp_store
from conformance.spec.waiting import all_are_here, let_the_device_finish
from conformance.torch_private import tables_with_entries

C10D = "torch/distributed/distributed_c10d.py of torch 2.13"

chapter = Chapter("groups")


def live_four_lives(me: Me) -> tuple[str, ...]:
    """Four times: a default group, a subgroup, work in both, and the end of both. Returns what
    the process holds more than after the first: a target may start something once and keep it."""
    before = take_census()
    for life in range(4):
        start(me, f"life {life}")
        group = dist.new_group([me.world_size - 1])
        sum_marks(me, group)
        x = torch.zeros(1 << 18, device=me.device)
        works = [dist.all_reduce(x.clone(), async_op=True) for _ in range(3)]
        for work in works:
            work.wait()
        del group, works, work
        dist.destroy_process_group()
        if life == 0:
            find_leaks(before)  # waits for what is about to go
            before = take_census()
    return find_leaks(before)


@chapter.must(
    "groups/leaves-nothing-behind",
    "After a group is destroyed, the process holds no thread, descriptor or shared memory of it.",
    source="torch 2.13 docs, destroy_process_group",
    rests_on="all_reduce/sum",
)
@world_sizes(1, 2, 3)
def test_nothing_is_left_of_destroyed_groups(bare_ranks: Ranks) -> None:
    assert_same_on_all_ranks(bare_ranks.run(live_four_lives), want=())


def watch_groups_go(me: Me) -> list[str]:
    """Which groups still exist after they are destroyed and not referenced any more."""
    start(me, "once")
    group = dist.new_group()
    assert dist.group.WORLD is not None
    subgroup = ("subgroup", weakref.ref(group))
    default_group = ("default group", weakref.ref(dist.group.WORLD))
    sum_marks(me, group)
    sum_marks(me)
    dist.destroy_process_group(group)
    del group
    gc.collect()
    left = [f"{name}, before the default group went" for name in still_alive([subgroup])]
    dist.destroy_process_group()
    gc.collect()
    return [*left, *still_alive([subgroup, default_group])]


@chapter.must(
    "groups/is-freed",
    "The object of a destroyed group is freed once nothing refers to it.",
    source="pytorch#94988",
    rests_on="all_reduce/sum",
)
@world_sizes(1, 2)
def test_destroyed_groups_are_freed(bare_ranks: Ranks) -> None:
    assert_same_on_all_ranks(bare_ranks.run(watch_groups_go), want=[])


def watch_a_store_go(me: Me) -> list[str]:
    """What is left of a group's own store, once neither of them is referenced."""
    before = take_census()
    store = tcp_store(me, "")
    watched = ("the store", weakref.ref(store))
    start(me, store)
    sum_marks(me, dist.new_group())
    dist.destroy_process_group()
    # Rank 0's is the server, which must not go before all others are through.
    all_are_here(me, "has destroyed its groups")
    del store
    gc.collect()
    left = [*find_leaks(before), *still_alive([watched])]
    return left + [f"entries in {name}" for name in tables_with_entries()]


@chapter.must(
    "groups/store-is-freed",
    "After a default group is destroyed, nothing holds its store, the store's connections or an "
    "entry in torch's tables of groups.",
    source="pytorch#94988",
    rests_on="groups/is-freed",
)
@world_sizes(1, 2)
def test_the_store_of_a_destroyed_group_is_freed(bare_ranks: Ranks) -> None:
    assert_same_on_all_ranks(bare_ranks.run(watch_a_store_go), want=[])


def size_when_all_is_over(group: dist.ProcessGroup, reduced: Any) -> int:
    time.sleep(0.05)  # until then the group is destroyed, with no other reference
    return group.size()


def leave_groups_to_callbacks(me: Me) -> Tensor:
    for _ in range(3):  # now and then another thread is the last one after all
        leave_a_group_to_a_callback(me)
    time.sleep(0.1)  # a process that dies of it dies here
    return sum_marks(me)


def leave_a_group_to_a_callback(me: Me) -> None:
    group = dist.new_group()
    reduced: Any = dist.all_reduce(mark(me), group=group, async_op=True).get_future()
    size = reduced.then(functools.partial(size_when_all_is_over, group))
    freed = threading.Event()
    weakref.finalize(group, freed.set)
    dist.destroy_process_group(group)
    del group, reduced
    assert size.wait() == me.world_size
    until = time.monotonic() + 10
    while not freed.wait(timeout=0.1) and time.monotonic() < until:
        gc.collect()  # what refers to itself, as a group in Python may, is freed by the collector
    assert freed.is_set(), "nothing holds the group, and it is there"


@chapter.must(
    "groups/last-held-by-a-callback",
    "A callback of an operation may hold the last reference to the group, as PowerSGD's may: the "
    "group is freed in whichever thread runs the callback, and the process continues.",
    source="pybind11 shares a group with whoever holds it; found with torch 2.13",
    rests_on=("destroy/one-group", "groups/is-freed", "work/future-then"),
)
@world_sizes(1, 2)
def test_a_callback_is_the_last_to_hold_a_group(ranks: Ranks) -> None:
    got = ranks.run(leave_groups_to_callbacks)
    assert_same_on_all_ranks(got, want=sum_of_marks(range(ranks.world_size)))


def destroy_one_of_two(me: Me) -> list[Tensor]:
    first, second = dist.new_group(), dist.new_group()
    sums = [sum_marks(me, first), sum_marks(me, second)]
    dist.destroy_process_group(first)
    third = dist.new_group()
    return [*sums, sum_marks(me, second), sum_marks(me), sum_marks(me, third)]


@chapter.must(
    "destroy/one-group",
    "Destroying a subgroup leaves the default group and other groups working, with what is pending "
    "in them.",
    source="torch 2.13 docs, destroy_process_group",
    rests_on="new_group/members",
)
@world_sizes(1, 2, 3)
def test_other_groups_live_on(ranks: Ranks) -> None:
    want = [sum_of_marks(range(ranks.world_size))] * 5
    assert_same_on_all_ranks(ranks.run(destroy_one_of_two), want=want)


def destroy_beside_pending(me: Me, gated: bool) -> list[Tensor]:
    """Sums that were pending in the default group and another one while a third one was destroyed.

    gated: rank 0 destroys it before another rank has begun the sums.
    """
    other, doomed = dist.new_group(), dist.new_group()
    sum_marks(me, doomed)
    if gated and me.rank:
        me.store.wait(["rank 0 has destroyed it"])
    sums = [mark(me) for _ in range(2)]
    works: list[Any] = [
        dist.all_reduce(x, group=group, async_op=True)
        for x, group in zip(sums, (None, other), strict=True)
    ]
    dist.destroy_process_group(doomed)
    if me.rank == 0:
        me.store.set("rank 0 has destroyed it", "1")
    for work in works:
        work.wait()
    return [*sums, sum_marks(me, other)]


@covers("destroy/one-group")
@world_sizes(2, 3)
@deadline(10)
def test_what_is_pending_in_other_groups_stays(ranks: Ranks) -> None:
    gated = ranks.target.capabilities.has("feature:nonblocking")
    want = [sum_of_marks(range(ranks.world_size))] * 3
    assert_same_on_all_ranks(ranks.run(destroy_beside_pending, gated), want=want)


def ask_of_a_destroyed_group(me: Me) -> None:
    group = dist.new_group()
    all_are_here(me, "the group is made")  # none may leave it while others connect
    dist.destroy_process_group(group)
    for ask in (dist.get_rank, dist.get_backend, dist.destroy_process_group):
        with pytest.raises(ValueError, match=r"not registered|not initialized|Invalid process"):
            ask(group)


@chapter.must(
    "destroy/unknown-group",
    "A destroyed group is unknown: asking for its rank or backend and destroying it again raise "
    "a ValueError.",
    source=f"{C10D}, destroy_process_group",
)
@world_sizes(1, 2)
def test_a_destroyed_group_is_unknown(ranks: Ranks) -> None:
    ranks.run(ask_of_a_destroyed_group)


def destroy_everything(me: Me) -> list[object]:
    dist.new_group([0])
    dist.destroy_process_group()
    with pytest.raises(ValueError, match="has not been initialized"):
        dist.all_reduce(mark(me))
    return [dist.is_initialized(), dist.get_pg_count(), dist.group.WORLD]


@chapter.must(
    "destroy/default-group",
    "Destroying the default group destroys all groups: nothing is initialized, no group is "
    "counted, and operations raise a ValueError that says 'has not been initialized'.",
    source="torch 2.13 docs, destroy_process_group",
)
@world_sizes(1, 2)
def test_destroying_the_default_group_destroys_all(ranks: Ranks) -> None:
    assert_same_on_all_ranks(ranks.run(destroy_everything), want=[False, 0, None])


def destroy_from_outside(me: Me) -> Tensor:
    group = dist.new_group([me.world_size - 1])
    dist.destroy_process_group(group)
    return sum_marks(me)


@chapter.must(
    "destroy/non-member",
    "A rank that is not a member may destroy the group too; this has no effect.",
    source=f"{C10D}, destroy_process_group",
    rests_on="all_reduce/sum",
)
@world_sizes(2, 3)
def test_a_rank_outside_may_destroy_the_group_too(ranks: Ranks) -> None:
    want = sum_of_marks(range(ranks.world_size))
    assert_same_on_all_ranks(ranks.run(destroy_from_outside), want=want)


def destroy_in_turns(me: Me) -> Tensor:
    """Each rank destroys three groups in an order of its own, one rank after the other."""
    groups = [dist.new_group() for _ in range(4)]
    for group in groups:
        sum_marks(me, group)
    all_are_here(me, "has no more to do")
    if me.rank:
        me.store.wait([f"rank {me.rank - 1} has destroyed its groups"])
    for place in range(3):
        dist.destroy_process_group(groups[(place + me.rank) % 3])
    me.store.set(f"rank {me.rank} has destroyed its groups", "1")
    return sum_marks(me, groups[3])


@chapter.must(
    "destroy/any-order",
    "Ranks may destroy their groups in different orders and at different times, once the groups' "
    "operations are complete.",
    source="torch 2.13 docs, shutdown",
    rests_on="new_group/members",
)
@world_sizes(2, 3)
@deadline(20)
def test_groups_are_destroyed_in_any_order(ranks: Ranks) -> None:
    want = sum_of_marks(range(ranks.world_size))
    assert_same_on_all_ranks(ranks.run(destroy_in_turns), want=want)


def destroy_each_other(me: Me) -> Tensor:
    """On rank 0, a callback of each of two groups destroys the other one."""
    groups = [dist.new_group() for _ in range(2)]
    if me.rank:
        me.store.wait(["callbacks are attached"])
        for group in groups:
            sum_marks(me, group)
        return sum_marks(me)
    both_run, has_returned = threading.Barrier(2), [threading.Event() for _ in groups]

    def destroy(other: int, _: Any) -> None:
        with contextlib.suppress(threading.BrokenBarrierError):  # one ran after the other
            both_run.wait(timeout=2)
        dist.destroy_process_group(groups[other])
        has_returned[other].set()

    sums = [mark(me) for _ in groups]
    for place, group in enumerate(groups):
        reduced: Any = dist.all_reduce(sums[place], group=group, async_op=True).get_future()
        reduced.add_done_callback(functools.partial(destroy, 1 - place))
    me.store.set("callbacks are attached", "")
    for place in range(2):
        assert has_returned[place].wait(timeout=10), "a callback that destroys a group hangs"
    return sum_marks(me)


@chapter.must(
    "destroy/in-callbacks",
    "Callbacks of two groups' operations may each destroy the other group at the same time: both "
    "return, and the default group keeps working.",
    source="derived: who ends a group waits for its threads, which may wait for him",
    needs="feature:nonblocking",
    rests_on=("destroy/one-group", "work/future"),
)
@world_sizes(2, 3)
def test_callbacks_destroy_each_others_groups(ranks: Ranks) -> None:
    want = sum_of_marks(range(ranks.world_size))
    assert_same_on_all_ranks(ranks.run(destroy_each_other), want=want)


def ask_handles_afterwards(me: Me) -> list[Any]:
    """What handles say when the groups of their operations are gone."""
    group = dist.new_group()
    works: list[Any] = [
        dist.all_reduce(mark(me), group=which, async_op=True) for which in (None, group)
    ]
    for work in works:
        work.wait()
    let_the_device_finish(me)
    dist.destroy_process_group(group)
    dist.destroy_process_group()
    return [
        said for work in works for said in (work.wait(), work.is_completed(), work.is_success())
    ]


@chapter.should(
    "destroy/handles-still-know",
    "After its group was destroyed, the handle of an operation that was waited for reports the "
    "same as before: wait returns, and it is completed and successful.",
    source="derived: a handle is of its operation, which is over",
    rests_on=("destroy/default-group", "all_reduce/sum"),
)
@world_sizes(1, 2)
def test_handles_outlive_their_group(ranks: Ranks) -> None:
    assert_same_on_all_ranks(ranks.run(ask_handles_afterwards), want=[True] * 6)


def leave_after_sending(me: Me, how: str, numel: int) -> Tensor:
    """Rank 0 destroys its groups as soon as it is through, before the others take what it sent,
    if it can be through without them."""
    start(me, "once", timeout=timedelta(seconds=10))
    dist.barrier()
    x = torch.arange(float(numel), device=me.device) * (me.rank == 0)
    if me.rank:
        appears(me.store, "gone")
    if how == "broadcast":
        dist.broadcast(x, 0)
    elif me.rank == 0:
        for peer in range(1, me.world_size):
            dist.send(x, peer)
    else:
        dist.recv(x, 0)
    seen = x.cpu()  # on a device, only now are its part and the operation over
    dist.destroy_process_group()
    if me.rank == 0:
        me.store.set("gone", "1")
    return seen


@chapter.must(
    "destroy/what-was-sent-arrives",
    "What a rank has sent arrives even if the rank destroys its groups before the others receive "
    "it.",
    source="torch 2.13 docs, Work.wait: the operation is complete",
    rests_on="destroy/default-group",
)
@needs("op:barrier")
@world_sizes(2, 3)
@pytest.mark.parametrize(
    "how",
    [
        pytest.param("broadcast", marks=needs("op:broadcast")),
        pytest.param("send", marks=needs("op:send")),
    ],
)
@pytest.mark.parametrize("numel", [4, 10_000, 1 << 18], ids=["small", "some", "large"])
def test_a_rank_leaves_after_it_has_sent(bare_ranks: Ranks, how: str, numel: int) -> None:
    got = bare_ranks.run(leave_after_sending, how, numel)
    assert_same_on_all_ranks(got, want=torch.arange(float(numel)))


def start_again(me: Me, places: list[str]) -> list[tuple[Tensor, int]]:
    """A default group and a subgroup at each place. Returns sums and how many groups there are."""
    seen = []
    for place in places:
        # Five seconds: a rank that cannot find the others should not keep them for long.
        start(me, place, timeout=timedelta(seconds=5))
        total = sum_marks(me) + sum_marks(me, dist.new_group())
        seen.append((total, dist.get_pg_count()))
        dist.destroy_process_group()
    return seen


@chapter.must(
    "init/again",
    "After the default group was destroyed, it can be made again, several times, under fresh "
    "keys of the same store.",
    source="torch 2.13 docs, destroy_process_group; pytorch#94988",
    rests_on="all_reduce/sum",
)
@world_sizes(1, 2, 3)
def test_the_default_group_is_made_again(bare_ranks: Ranks) -> None:
    got = bare_ranks.run(start_again, ["first", "second", "third"])
    assert_same_on_all_ranks(got, want=[(2 * sum_of_marks(range(bare_ranks.world_size)), 2)] * 3)


@chapter.should(
    "init/again-on-the-same-keys",
    "The default group can be made again with exactly the same store as before, without fresh "
    "keys.",
    source="pytorch#55967",
    rests_on="init/again",
)
@world_sizes(2)
@deadline(10)
def test_the_default_group_is_made_again_at_the_same_place(bare_ranks: Ranks) -> None:
    got = bare_ranks.run(start_again, ["here"] * 6)
    assert_same_on_all_ranks(got, want=[(2 * sum_of_marks(range(bare_ranks.world_size)), 2)] * 6)


def go_on_without_rank_0(me: Me) -> list[Any]:
    """The others make a group of their own, numbered backwards."""
    start(me, "together")
    sums: list[Any] = [sum_marks(me)]
    dist.destroy_process_group()
    if me.rank:
        start(me, "fewer", rank=me.world_size - 1 - me.rank, world_size=me.world_size - 1)
        x = mark(me)
        dist.all_reduce(x)
        told = mark(me)
        dist.broadcast(told, 0)
        sums += [x, told, dist.get_rank(), dist.get_world_size()]
    return sums


@chapter.must(
    "init/again-with-fewer-ranks",
    "After the default group was destroyed, some of its ranks can make a smaller one, with new "
    "rank numbers.",
    source="torch elastic, restarts with another world size",
    rests_on="init/again",
)
@world_sizes(2, 3, 4, at_least=2)
def test_some_ranks_go_on_without_the_others(bare_ranks: Ranks) -> None:
    n = bare_ranks.world_size
    together, fewer = sum_of_marks(range(n)), sum_of_marks(range(1, n))
    of_last = sum_of_marks([n - 1])
    want: list[list[Any]] = [[together]]
    want += [[together, fewer, of_last, n - 1 - rank, n - 1] for rank in range(1, n)]
    assert_each_rank(bare_ranks.run(go_on_without_rank_0), want)

"""A store that several ranks and threads use at the same time."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from conformance import Chapter, Me, Ranks, needs, world_sizes
from conformance.spec.facts import rows, unlike
from conformance.spec.stores.facts import (
    Fact,
    check_store,
    is_through,
    seconds_of,
)
from conformance.spec.waiting import all_are_here

DOCS = "torch 2.13 docs, Distributed Key-Value Store"

chapter = Chapter("stores", source=DOCS)

_ROUNDS = 50
_THREADS = 4
_LONG = timedelta(seconds=4)


def seen_by_all(me: Me, store: Any) -> list[str]:
    store.set(f"of/{me.rank}", f"value {me.rank}")
    seen = [store.get(f"of/{rank}") for rank in range(me.world_size)]
    return unlike("values", seen, [f"value {rank}".encode() for rank in range(me.world_size)])


def overwritten_by_another(me: Me, store: Any) -> list[str]:
    found = []
    for writer in range(me.world_size):
        if me.rank == writer:
            store.set("key", f"value {writer}")
            is_through(store)
        all_are_here(me, f"written {writer}")
        found += unlike(f"value of rank {writer}", store.get("key"), f"value {writer}".encode())
        all_are_here(me, f"read {writer}")
    return found


def deleted_by_another(me: Me, store: Any) -> list[str]:
    if me.rank == 0:
        store.set("key", "value")
        is_through(store)
    all_are_here(me, "set")
    returned = store.delete_key("key") if me.rank == me.world_size - 1 else True
    all_are_here(me, "deleted")
    return unlike("returned, is there", (returned, store.check(["key"])), (True, False))


def added_by_all(me: Me, store: Any) -> list[str]:
    all_are_here(me, "before")
    sums = [store.add("count", 1) for _ in range(_ROUNDS)]
    all_are_here(me, "added")
    found = unlike("sum of all", store.add("count", 0), me.world_size * _ROUNDS)
    return found if sums == sorted({*sums}) else [*found, f"own sums do not rise: {sums}"]


def each_sum_once(me: Me, store: Any) -> list[str]:
    """What ranks number themselves by."""
    all_are_here(me, "before")
    for _ in range(_ROUNDS):
        store.set(f"taken/{store.add('ticket', 1)}", str(me.rank))
    is_through(store)
    all_are_here(me, "taken")
    keys = [f"taken/{i + 1}" for i in range(me.world_size * _ROUNDS)]
    return unlike("each number was taken", store.check(keys), True)


def one_wins(me: Me, store: Any) -> list[str]:
    found = []
    for i in range(10):
        all_are_here(me, f"before {i}")
        won = store.compare_set(f"winner/{i}", "", str(me.rank))
        all_are_here(me, f"after {i}")
        found += unlike("what compare_set returned is the value", won, store.get(f"winner/{i}"))
    return found


def one_replaces(me: Me, store: Any) -> list[str]:
    """All ranks count by compare_set of what they have read, until each has won some times."""
    if me.rank == 0:
        store.set("counter", "0")
    all_are_here(me, "before")
    wins = 0
    while wins < _ROUNDS:
        old = store.get("counter").decode()
        mine = f"{int(old.partition(' ')[0]) + 1} {me.rank}"
        wins += store.compare_set("counter", old, mine) == mine.encode()
    all_are_here(me, "after")
    count = int(store.get("counter").decode().partition(" ")[0])
    return unlike("how often a rank has replaced the value", count, me.world_size * _ROUNDS)


def appended_by_all(me: Me, store: Any) -> list[str]:
    all_are_here(me, "before")
    for _ in range(_ROUNDS):
        store.append("log", f"<{me.rank}>")
    is_through(store)
    all_are_here(me, "appended")
    log = store.get("log").decode()
    counts = [log.count(f"<{rank}>") for rank in range(me.world_size)]
    found = unlike("whole pieces of each rank", counts, [_ROUNDS] * me.world_size)
    return found + unlike("characters", len(log), 3 * _ROUNDS * me.world_size)


def counted_by_all(me: Me, store: Any) -> list[str]:
    """A barrier as programs write it: count, and wait for the last one's word."""
    found = []
    for i in range(5):
        time.sleep(0.01 * me.rank)
        if store.add(f"arrived/{i}", 1) == me.world_size:
            store.set(f"all/{i}", "yes")
        store.wait([f"all/{i}"])
        found += unlike("ranks that arrived", store.add(f"arrived/{i}", 0), me.world_size)
    return found


def popped_once(me: Me, store: Any) -> list[str]:
    for i in range(_ROUNDS):
        store.queue_push("queue", f"{me.rank} {i}")
    got = [store.queue_pop("queue").decode() for _ in range(_ROUNDS)]
    store.set(f"got/{me.rank}", "\n".join(got))
    all_got = []
    for rank in range(me.world_size):
        all_got += store.get(f"got/{rank}").decode().splitlines()
    pushed = [f"{rank} {i}" for rank in range(me.world_size) for i in range(_ROUNDS)]
    return unlike("all that was popped", sorted(all_got), sorted(pushed))


def store_barrier(me: Me, store: Any) -> list[str]:
    found = []
    for i in range(3):
        time.sleep(0.01 * me.rank)
        store.add(f"before/{i}", 1)
        store.barrier(f"barrier/{i}", me.world_size, timedelta(seconds=20))
        found += unlike("ranks that had come", store.add(f"before/{i}", 0), me.world_size)
    return found


def large_values_at_once(me: Me, store: Any) -> list[str]:
    value = str(me.rank) * (1 << 20)
    all_are_here(me, "before")
    for i in range(3):
        store.set(f"of/{me.rank}/{i}", value)
    other = (me.rank + 1) % me.world_size
    seen = [store.get(f"of/{other}/{i}") == str(other).encode() * (1 << 20) for i in range(3)]
    return unlike("are what the other rank set", seen, [True] * 3)


def _in_threads(work: Callable[[int], None]) -> list[str]:
    """What each thread raised."""
    errors: list[str] = []

    def run(index: int) -> None:
        try:
            work(index)
        except Exception as error:
            errors.append(f"thread {index}: {type(error).__name__}: {error}")

    threads = [threading.Thread(target=run, args=(i,)) for i in range(_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def used_by_threads(me: Me, store: Any) -> list[str]:
    def work(index: int) -> None:
        for i in range(_ROUNDS):
            store.add("count", 1)
            store.set(f"{index}/{i}", f"{index} {i}")
            if store.get(f"{index}/{i}") != f"{index} {i}".encode():
                raise AssertionError("it got another value than it set")

    return _in_threads(work) + unlike("sum", store.add("count", 0), _THREADS * _ROUNDS)


def clones_in_threads(me: Me, store: Any) -> list[str]:
    """One thread waits by a clone for what another one sets."""
    clones = [store.clone() for _ in range(_THREADS)]

    def work(index: int) -> None:
        clones[index].set(f"of/{index}", str(index))
        clones[index].wait([f"of/{i}" for i in range(_THREADS)])

    return _in_threads(work)


def waits_in_one_thread(me: Me, store: Any) -> list[str]:
    """While one thread waits for a key, another sets it, by the same store."""
    store.set_timeout(_LONG)
    got: list[Any] = []

    def get() -> None:
        with contextlib.suppress(Exception):  # then `got` is empty
            got.append(store.get("later"))

    waiting = threading.Thread(target=get)
    waiting.start()
    waiting.join(0.2)
    taken_s = seconds_of(lambda: store.set("later", "value"))
    waiting.join()
    if taken_s > _LONG.total_seconds() / 2:
        return [f"set took {taken_s:.1f} s while another thread waited in get"]
    return unlike("what the other thread got", got, [b"value"])


def carries_a_group(me: Me, store: Any) -> list[str]:
    dist.init_process_group(
        me.target.backend,
        store=store,
        rank=me.rank,
        world_size=me.world_size,
        timeout=timedelta(seconds=20),
        pg_options=me.options,
    )
    gathered: list[Any] = [None] * me.world_size
    dist.all_gather_object(gathered, f"of {me.rank}")
    dist.destroy_process_group()
    return unlike("objects", gathered, [f"of {rank}" for rank in range(me.world_size)])


OF_RANKS = rows(
    (chapter.must("store/seen-by-all", "What one rank sets, every rank gets."), seen_by_all),
    (
        chapter.must(
            "store/newest-for-all",
            "Once the rank that has set a value is answered again, every rank gets it.",
        ),
        overwritten_by_another,
    ),
    (
        chapter.must(
            "store/deleted-for-all",
            "Once delete_key has returned, the key is gone for every rank.",
            needs="feature:store_keys",
        ),
        deleted_by_another,
    ),
    (
        chapter.must("store/added-by-all", "No add is lost where all ranks add at the same time."),
        added_by_all,
    ),
    (
        chapter.must(
            "store/each-sum-once",
            "add returns each sum to one rank alone.",
            rests_on="store/added-by-all",
        ),
        each_sum_once,
    ),
    (
        chapter.must(
            "store/one-wins",
            "Where all ranks call compare_set on a new key, one of them sets it, and each is told "
            "its value.",
        ),
        one_wins,
    ),
    (
        chapter.must(
            "store/one-replaces",
            "Where several ranks call compare_set on the value that a key has, one of them "
            "replaces it.",
            rests_on="store/one-wins",
        ),
        one_replaces,
    ),
    (
        chapter.must(
            "store/appended-by-all",
            "No append is lost, and none comes between another's bytes.",
            needs="feature:store_extended",
        ),
        appended_by_all,
    ),
    (
        chapter.must(
            "store/counted-barrier",
            "A barrier that is made of add, set and wait holds ranks until the last one comes.",
            rests_on="store/added-by-all",
        ),
        counted_by_all,
    ),
    (
        chapter.must(
            "store/large-at-once", "Values of 1 MiB arrive whole where all ranks set some at once."
        ),
        large_values_at_once,
    ),
    (
        chapter.must(
            "store/popped-once",
            "Each value of a queue is popped by one rank, once.",
            needs="feature:store_queues",
        ),
        popped_once,
    ),
    (
        chapter.must(
            "store/barrier",
            "barrier of a store holds each rank until all have come.",
            needs="feature:store_barrier",
        ),
        store_barrier,
    ),
)

OF_THREADS = rows(
    (
        chapter.must("store/threads", "Threads of a rank may use one store at the same time."),
        used_by_threads,
    ),
    (
        chapter.must(
            "store/clones-in-threads",
            "Threads wait for each other where each has a clone of the store.",
            needs="feature:store_clone",
            rests_on="store/clone",
        ),
        clones_in_threads,
    ),
    (
        chapter.should(
            "store/waits-alone",
            "A thread that waits for a key does not keep another from setting it by the same "
            "store.",
            source="torch 2.13, HashStore and FileStore; docs: a store may be used by threads",
            rests_on="store/threads",
        ),
        waits_in_one_thread,
    ),
)


@needs("feature:store_of_processes")
@world_sizes(2, 3)
@pytest.mark.parametrize("fact", OF_RANKS)
def test_ranks(bare_ranks: Ranks, fact: Fact, tmp_path: Path) -> None:
    check_store(bare_ranks, fact, tmp_path)


@needs("feature:store_of_processes", "op:all_gather", "dtype:uint8", "dtype:int64")
@chapter.must(
    "store/carries-a-group",
    "A group of the target can be made on the store.",
    source="torch 2.13 docs, init_process_group, argument store",
)
@world_sizes(2)
def test_groups(bare_ranks: Ranks, tmp_path: Path) -> None:
    check_store(bare_ranks, carries_a_group, tmp_path)


@world_sizes(1)
@pytest.mark.parametrize("fact", OF_THREADS)
def test_threads(bare_ranks: Ranks, fact: Fact, tmp_path: Path) -> None:
    check_store(bare_ranks, fact, tmp_path)

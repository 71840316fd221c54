"""init_process_group: stores, URLs, errors, the barrier after it, and the store's timeout."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from conformance import (
    Chapter,
    Me,
    Ranks,
    assert_same_on_all_ranks,
    assert_that,
    deadline,
    world_sizes,
)
from conformance.spec.groups.membership_sums import mark, sum_marks, sum_of_marks
from conformance.spec.groups.starting import start
from conformance.spec.groups.stores import STORES, NobodyElseComes, tcp_store
from conformance.spec.waiting import all_are_here
from conformance.torch_private import default_store, store_based_barrier

C10D = "torch/distributed/distributed_c10d.py of torch 2.13"

chapter = Chapter("groups")


def start_twice(me: Me) -> Tensor:
    with pytest.raises(ValueError, match="twice"):
        start(me, "once more")
    return sum_marks(me)


@chapter.must(
    "init/twice",
    "init_process_group while there is a default group raises a ValueError that says 'twice', "
    "and the group keeps working.",
    source=f"{C10D}, init_process_group",
    rests_on="all_reduce/sum",
)
@world_sizes(1, 2)
def test_a_second_default_group_is_refused(ranks: Ranks) -> None:
    want = sum_of_marks(range(ranks.world_size))
    assert_same_on_all_ranks(ranks.run(start_twice), want=want)


def start_badly(me: Me) -> None:
    init: Callable[..., None] = dist.init_process_group
    backend, store = me.target.backend, dist.HashStore()
    wrong: list[tuple[dict[str, Any], tuple[type[Exception], ...], str]] = [
        ({"store": store, "rank": 0}, (AssertionError, ValueError), "world_size"),
        ({"store": store, "world_size": 1}, (AssertionError, ValueError), "rank"),
        ({"store": store, "rank": 0, "world_size": 0}, (AssertionError, ValueError), "world_size"),
        (
            {"store": store, "rank": 0, "world_size": 1, "init_method": "env://"},
            (AssertionError, ValueError),
            "init_method and store",
        ),
        ({"store": store, "rank": 0, "world_size": 1, "timeout": 5}, (TypeError,), "timedelta"),
        ({"init_method": "nowhere://"}, (RuntimeError,), "nowhere"),
        ({"init_method": "env://"}, (ValueError,), "environment variable"),
    ]
    for arguments, kinds, words in wrong:
        with pytest.raises(kinds, match=words):
            init(backend, **arguments)
    with pytest.raises((AssertionError, ValueError, RuntimeError), match=r"(?i)no_such_backend"):
        init("no_such_backend", store=store, rank=0, world_size=1)
    with pytest.raises(ValueError, match="string"):
        init(5, store=store, rank=0, world_size=1)
    if dist.is_initialized():
        pytest.fail("a refused call has left a default group")
    start(me, "after all")


@chapter.must(
    "init/arguments",
    "A store without rank or world size, a store together with an init_method, an unknown "
    "backend, a timeout that is not a timedelta and an unknown URL raise, and nothing is "
    "initialized.",
    source=f"{C10D}, init_process_group",
)
@world_sizes(1)
def test_bad_arguments_are_refused(bare_ranks: Ranks) -> None:
    bare_ranks.run(start_badly)


def start_with_a_rank_too_high(me: Me) -> None:
    with pytest.raises((RuntimeError, ValueError)):
        start(me, "too high", rank=me.world_size + 2, timeout=timedelta(seconds=5))


@chapter.should(
    "init/rank-out-of-range",
    "A rank that is not less than the world size is refused at once.",
    source="gloo: 'rank < size'",
)
@world_sizes(1)
@deadline(10)
def test_a_rank_beyond_the_world_is_refused(bare_ranks: Ranks) -> None:
    bare_ranks.run(start_with_a_rank_too_high)


def live_without_a_group(me: Me) -> bool:
    x = mark(me)
    needed: list[Callable[[], object]] = [
        lambda: dist.all_reduce(x),
        lambda: dist.broadcast(x, 0),
        lambda: dist.barrier(),
        lambda: dist.isend(x, 0),
        lambda: dist.all_gather_object([None], 1),
        lambda: dist.new_group([0]),
        dist.get_rank,
        dist.get_world_size,
        dist.get_backend,
    ]
    for call in needed:
        with pytest.raises(ValueError, match="has not been initialized"):
            call()
    return dist.is_initialized()


@chapter.must(
    "init/needed",
    "Without a default group is_initialized is false, and everything that needs one raises a "
    "ValueError that says so.",
    source=f"{C10D}, _get_default_group",
)
@world_sizes(1, 2)
def test_without_a_default_group_nothing_works(bare_ranks: Ranks) -> None:
    assert_same_on_all_ranks(bare_ranks.run(live_without_a_group), want=False)


def start_on_a_store(me: Me, kind: str, path: str) -> Tensor:
    store = STORES[kind](me, path)  # held: torch loses what a Python store does with the object
    start(me, store)
    total = sum_marks(me) + sum_marks(me, dist.new_group())
    dist.barrier()  # the server of a TCPStore must outlive the others' last use of it
    dist.destroy_process_group()
    return total


@chapter.must(
    "init/stores",
    "The default group can be made on a FileStore, a TCPStore, a prefix of one, and a store "
    "written in Python.",
    source="torch 2.13 docs, Store",
    rests_on="all_reduce/sum",
)
@world_sizes(1, 2, 3)
@pytest.mark.parametrize("kind", STORES)
def test_a_default_group_on_every_kind_of_store(
    bare_ranks: Ranks, kind: str, tmp_path: Path
) -> None:
    got = bare_ranks.run(start_on_a_store, kind, str(tmp_path / "store"))
    assert_same_on_all_ranks(got, want=2 * sum_of_marks(range(bare_ranks.world_size)))


def start_by_a_method(me: Me, method: str, path: str) -> Tensor:
    """By a URL or by the environment; rank 0 has put up a store, as torch's launcher does."""
    arguments: dict[str, Any] = {"rank": me.rank, "world_size": me.world_size}
    server = None
    if method == "file":
        arguments["init_method"] = f"file://{path}"
    else:
        if me.rank == 0:
            server = tcp_store(me, path)
        port = me.store.get("port").decode()
        # With the agent's store, every rank is a client: no rank has to guess a free port.
        os.environ.update(
            TORCHELASTIC_USE_AGENT_STORE="True", MASTER_ADDR=me.host, MASTER_PORT=port
        )
    if method == "tcp":
        host = f"[{me.host}]" if ":" in me.host else me.host
        arguments["init_method"] = f"tcp://{host}:{port}"
    if method == "env":
        os.environ.update(RANK=str(me.rank), WORLD_SIZE=str(me.world_size))
        arguments = {}
    dist.init_process_group(me.target.backend, pg_options=me.options, **arguments)
    total = sum_marks(me)
    dist.barrier()
    dist.destroy_process_group()
    del server
    return total


@chapter.must(
    "init/methods",
    "The default group can be made from a store, from a file:// and a tcp:// URL and from "
    "environment variables.",
    source="torch 2.13 docs, init_process_group",
    rests_on="all_reduce/sum",
)
@world_sizes(1, 2, 3)
@pytest.mark.parametrize("method", ["file", "tcp", "env"])
def test_a_default_group_by_every_method(bare_ranks: Ranks, method: str, tmp_path: Path) -> None:
    got = bare_ranks.run(start_by_a_method, method, str(tmp_path / "store"))
    assert_same_on_all_ranks(got, want=sum_of_marks(range(bare_ranks.world_size)))


def start_together(me: Me, kind: str, path: str) -> list[bool]:
    """Whether all ranks had arrived when init_process_group returned, and when new_group did.

    Marks are added, not set: a TCPStore's `set` returns before the server has taken it in, so a
    check over another connection could come first.
    """
    store = STORES[kind](me, path)
    os.environ["TORCH_DIST_INIT_BARRIER"] = "1"
    everybody = range(me.world_size)
    seen = []
    me.store.add(f"{me.rank} comes to init", 1)
    start(me, store)
    seen.append(me.store.check([f"{rank} comes to init" for rank in everybody]))
    me.store.add(f"{me.rank} comes to new_group", 1)
    dist.new_group([me.world_size - 1])
    seen.append(me.store.check([f"{rank} comes to new_group" for rank in everybody]))
    all_are_here(me, "done")
    dist.destroy_process_group()
    return seen


@chapter.must(
    "init/barrier",
    "With TORCH_DIST_INIT_BARRIER=1, init_process_group and new_group return only when all their "
    "ranks have arrived, with every kind of store.",
    source=f"{C10D}, _store_based_barrier; pytorch#49930",
    rests_on="init/stores",
)
@world_sizes(1, 2, 3)
@pytest.mark.parametrize("kind", STORES)
def test_a_barrier_after_init_on_every_kind_of_store(
    bare_ranks: Ranks, kind: str, tmp_path: Path
) -> None:
    got = bare_ranks.run(start_together, kind, str(tmp_path / "store"))
    assert_same_on_all_ranks(got, want=[True, True])


def wait_for_ranks_that_never_come(me: Me) -> tuple[str, list[int]]:
    """Two of four come to the barrier of a store. Returns what is said, and how often it waited."""
    store = NobodyElseComes()
    for rank in (0, 2):
        with pytest.raises(dist.DistStoreError) as caught:
            store_based_barrier(store, rank, 4, timedelta(0))
    if not issubclass(dist.DistStoreError, dist.DistError):
        pytest.fail("a DistStoreError is no DistError")
    return str(caught.value), [len(keys) for keys in store.waits]


@chapter.must(
    "init/barrier-timeout",
    "When its timeout is over, the barrier of a store raises a DistStoreError that gives the "
    "number of ranks that arrived.",
    source="test_c10d_common.py, store based barrier",
)
@world_sizes(1)
def test_the_barrier_of_a_store_says_who_came(bare_ranks: Ranks) -> None:
    [(message, waits)] = bare_ranks.run(wait_for_ranks_that_never_come)
    for words in ("Timed out initializing process group in store based barrier", "rank 2"):
        assert_that(words in message, f"the error does not say {words!r}: {message}")
    counts = "world_size=4" in message and "num_workers_joined=2" in message
    assert_that(counts, f"the error does not count the ranks: {message}")
    assert_that(waits == [1, 1], f"it waited for {waits} keys, want one key each time")


def wait_for_a_missing_key(me: Me, method: str, path: str) -> float:
    """The timeout of the group, a second, is its store's. Returns how long it waited, in s."""
    url = f"file://{path}" if method == "file" else "tcp://127.0.0.1:0?use_libuv=0"
    dist.init_process_group(
        me.target.backend, url, timedelta(seconds=1), 1, 0, pg_options=me.options
    )
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=r"(?i)time.?out|timed out"):
        default_store().get("a key that nobody sets")
    return time.monotonic() - began


@chapter.must(
    "init/store-timeout",
    "The store of a group that was made from a URL with a timeout gives up on a missing key "
    "after that timeout.",
    source="test_c10d_common.py, default store timeout",
)
@world_sizes(1)
@deadline(20)
@pytest.mark.parametrize("method", ["file", "tcp"])
def test_the_store_gives_up_after_the_timeout(
    bare_ranks: Ranks, method: str, tmp_path: Path
) -> None:
    [waited_s] = bare_ranks.run(wait_for_a_missing_key, method, str(tmp_path / "store"))
    # Stores count in whole milliseconds, and some look at another clock.
    assert_that(waited_s > 0.9, f"the store gave up after {waited_s:.2f} s of 1 s")


def watch_the_timeout_of_a_store(me: Me) -> list[float]:
    """The timeout of the user's store, in s: with groups made on it, after work, and afterwards."""
    store: Any = tcp_store(me, "")  # torch's stub of a store lacks its timeout
    store.set_timeout(timedelta(seconds=77))
    start(me, store)
    seen = [store.timeout.total_seconds()]
    for members in (None, [0]):
        sum_marks(me, dist.new_group(members, timeout=timedelta(seconds=55)))
        seen.append(store.timeout.total_seconds())
    dist.destroy_process_group()
    seen.append(store.timeout.total_seconds())
    # Rank 0's is the server, which must not go before all others are through.
    all_are_here(me, "through")
    return seen


@chapter.must(
    "init/store-keeps-its-timeout",
    "A store on which groups are made keeps the timeout that it had, whatever the timeouts of the "
    "groups.",
    source="observed, torch 2.13.0: its user waits on it too",
    rests_on="init/stores",
)
@world_sizes(1, 2)
def test_the_timeout_of_a_store_stays(bare_ranks: Ranks) -> None:
    assert_same_on_all_ranks(bare_ranks.run(watch_the_timeout_of_a_store), want=[77.0] * 4)

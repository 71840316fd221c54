"""Waiting for keys: timeouts, the errors that end it, and what wakes it."""

from __future__ import annotations

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
    PATIENCE_S,
    SHORT,
    Fact,
    check_store,
    is_usable,
    raised,
    seconds_of,
    value_of,
)
from conformance.spec.waiting import all_are_here

DOCS = "torch 2.13 docs, Distributed Key-Value Store"

chapter = Chapter("stores", source=DOCS)

_SOON_S = 5.0  # for what takes SHORT, on a busy machine
_BY_ITSELF_S = PATIENCE_S / 2  # before the timeout has anything to do with it


def set_timeout(me: Me, store: Any) -> list[str]:
    store.set_timeout(SHORT)
    return unlike("timeout", store.timeout, SHORT)


def _ends_in_time(what: str, call: Callable[[], Any]) -> list[str]:
    """Whether the call raises an error when the short timeout is over."""
    taken_s = seconds_of(lambda: raised(call, Exception))
    if SHORT.total_seconds() * 0.9 <= taken_s <= _SOON_S:
        return []
    return [f"{what}: ended after {taken_s:.2f} s; the timeout is {SHORT.total_seconds()} s"]


def get_of_a_missing_key(me: Me, store: Any) -> list[str]:
    store.set_timeout(SHORT)
    return _ends_in_time("get", lambda: store.get("missing"))


def wait_for_a_missing_key(me: Me, store: Any) -> list[str]:
    store.set_timeout(SHORT)
    store.set("there", "1")
    found = _ends_in_time("wait for one", lambda: store.wait(["missing"]))
    return found + _ends_in_time("wait for two", lambda: store.wait(["there", "missing"]))


def wait_with_a_timeout(me: Me, store: Any) -> list[str]:
    found = _ends_in_time("wait", lambda: store.wait(["missing"], SHORT))
    return found + unlike("timeout of the store", store.timeout, timedelta(seconds=PATIENCE_S))


def wait_for_many(me: Me, store: Any) -> list[str]:
    """The last of a hundred keys is missing, then the first."""
    keys = [f"key {i}" for i in range(100)]
    for key in keys[:-1]:
        store.set(key, "1")
    found = _ends_in_time("wait", lambda: store.wait(keys, SHORT))
    return found + _ends_in_time("wait", lambda: store.wait(keys[::-1], SHORT))


def multi_get_of_a_missing_key(me: Me, store: Any) -> list[str]:
    store.set_timeout(SHORT)
    store.set("there", "1")
    return _ends_in_time("multi_get", lambda: store.multi_get(["there", "missing"]))


def pop_of_an_empty_queue(me: Me, store: Any) -> list[str]:
    store.set_timeout(SHORT)
    return _ends_in_time("queue_pop", lambda: store.queue_pop("queue"))


def kind_of_error(me: Me, store: Any) -> list[str]:
    store.set_timeout(SHORT)
    raised(lambda: store.get("missing"), dist.DistStoreError)
    raised(lambda: store.wait(["missing"]), dist.DistStoreError)
    return []


def names_the_key(me: Me, store: Any) -> list[str]:
    store.set_timeout(SHORT)
    calls = {"get": lambda: store.get("that-one"), "wait": lambda: store.wait(["that-one"])}
    said = {name: raised(call, Exception) for name, call in calls.items()}
    return [f"{n} says {text!r}" for n, text in said.items() if "that-one" not in text]


def names_no_other_key(me: Me, store: Any) -> list[str]:
    store.set_timeout(SHORT)
    store.set("present", "1")
    said = raised(lambda: store.wait(["present", "that-one"]), Exception)
    return [f"it names a key that is there: {said!r}"] if "present" in said else []


def usable_after_a_timeout(me: Me, store: Any) -> list[str]:
    raised(lambda: store.wait(["missing"], SHORT), Exception)
    if found := is_usable(store):
        return found
    store.set("missing", "late")
    return unlike("a key that was waited for", store.get("missing"), b"late")


def wait_for_what_is_there(me: Me, store: Any) -> list[str]:
    store.set("a", "1")
    store.add("b", 1)
    store.set("c", "")
    taken_s = seconds_of(lambda: store.wait(["a", "b", "c"])) + seconds_of(lambda: store.wait([]))
    return [] if taken_s < _BY_ITSELF_S else [f"it took {taken_s:.1f} s"]


def _set_later(me: Me, store: Any, change: Any) -> bool:
    """Rank 0 makes the change when the others wait, as far as it can know."""
    all_are_here(me, "before")
    if me.rank > 0:
        return False
    time.sleep(0.05)
    change()
    return True


def woken_by_set(me: Me, store: Any) -> list[str]:
    _set_later(me, store, lambda: store.set("key", "value"))
    return unlike("value", store.get("key"), b"value")


def woken_by_add(me: Me, store: Any) -> list[str]:
    _set_later(me, store, lambda: store.add("key", 3))
    store.wait(["key"])
    return unlike("value", value_of(store, "key"), b"3")


def woken_by_compare_set(me: Me, store: Any) -> list[str]:
    _set_later(me, store, lambda: store.compare_set("key", "", "value"))
    return unlike("value", store.get("key"), b"value")


def woken_by_append(me: Me, store: Any) -> list[str]:
    _set_later(me, store, lambda: store.append("key", "value"))
    return unlike("value", store.get("key"), b"value")


def woken_by_multi_set(me: Me, store: Any) -> list[str]:
    _set_later(me, store, lambda: store.multi_set(["a", "b"], ["1", "2"]))
    return unlike("values", store.multi_get(["b", "a"]), [b"2", b"1"])


def woken_by_all_keys(me: Me, store: Any) -> list[str]:
    """The last of the keys is set by the last rank."""
    all_are_here(me, "before")
    time.sleep(0.02 * me.rank)
    store.set(f"key/{me.rank}", str(me.rank))
    keys = [f"key/{rank}" for rank in range(me.world_size)]
    store.wait(keys)
    return unlike("all are there", store.check(keys), True)


def woken_by_push(me: Me, store: Any) -> list[str]:
    def push() -> None:
        for rank in range(1, me.world_size):
            store.queue_push("queue", str(rank))

    if _set_later(me, store, push):
        got = [store.get(f"got/{rank}") for rank in range(1, me.world_size)]
        return unlike("values", sorted(got), [b"%d" % rank for rank in range(1, me.world_size)])
    store.set(f"got/{me.rank}", store.queue_pop("queue").decode())
    return []


FACTS = rows(
    (
        chapter.must("store/set-timeout", "set_timeout changes the timeout, which timeout tells."),
        set_timeout,
    ),
    (
        chapter.must(
            "store/get-timeout",
            "get of a key that is not set ends with an error when the timeout is over.",
        ),
        get_of_a_missing_key,
    ),
    (
        chapter.must(
            "store/wait-timeout",
            "wait ends with an error when the timeout is over and one of the keys is missing.",
        ),
        wait_for_a_missing_key,
    ),
    (
        chapter.must(
            "store/own-timeout",
            "wait takes a timeout of its own, and the store keeps the one that it has.",
            rests_on="store/wait-timeout",
        ),
        wait_with_a_timeout,
    ),
    (
        chapter.must(
            "store/multi-get-timeout",
            "multi_get ends with an error when the timeout is over and one of the keys is missing.",
            needs="feature:store_extended",
            rests_on="store/get-timeout",
        ),
        multi_get_of_a_missing_key,
    ),
    (
        chapter.must(
            "store/timeout-error",
            "A timeout raises a DistStoreError.",
            source="torch 2.13 docs, torch.distributed.DistStoreError",
            rests_on=("store/get-timeout", "store/wait-timeout"),
        ),
        kind_of_error,
    ),
    (
        chapter.should(
            "store/timeout-names-the-key",
            "The error of a timeout names the key that was waited for.",
            source="observed, torch 2.13.0: TCPStore",
            rests_on=("store/get-timeout", "store/wait-timeout"),
        ),
        names_the_key,
    ),
    (
        chapter.should(
            "store/timeout-names-no-other-key",
            "The error of a timeout names no key that is there.",
            source="what a reader of the message needs: whom to look for",
            rests_on="store/timeout-names-the-key",
        ),
        names_no_other_key,
    ),
    (
        chapter.must(
            "store/after-a-timeout",
            "The store can be used after a timeout, the key that was waited for included.",
            rests_on="store/own-timeout",
        ),
        usable_after_a_timeout,
    ),
    (
        chapter.must(
            "store/wait-for-what-is-there",
            "wait returns at once for keys that are there, and for none.",
        ),
        wait_for_what_is_there,
    ),
    (
        chapter.must("store/wait-for-many", "wait for a hundred keys waits for each of them."),
        wait_for_many,
    ),
    (
        chapter.must(
            "store/queue-timeout",
            "queue_pop of an empty queue ends with an error when the timeout is over.",
            needs="feature:store_queues",
        ),
        pop_of_an_empty_queue,
    ),
)

OF_RANKS = rows(
    (
        chapter.must("store/woken-by-set", "set wakes all ranks that wait for the key."),
        woken_by_set,
    ),
    (
        chapter.must("store/woken-by-add", "add of a new key wakes all ranks that wait for it."),
        woken_by_add,
    ),
    (
        chapter.must(
            "store/woken-by-compare-set",
            "compare_set of a new key wakes all ranks that wait for it.",
        ),
        woken_by_compare_set,
    ),
    (
        chapter.must(
            "store/woken-by-append",
            "append of a new key wakes all ranks that wait for it.",
            needs="feature:store_extended",
        ),
        woken_by_append,
    ),
    (
        chapter.must(
            "store/woken-by-multi-set",
            "multi_set wakes all ranks that wait for its keys.",
            needs="feature:store_extended",
        ),
        woken_by_multi_set,
    ),
    (
        chapter.must(
            "store/woken-by-all", "wait for several keys ends when the last of them is set."
        ),
        woken_by_all_keys,
    ),
    (
        chapter.must(
            "store/woken-by-push",
            "Each value that is pushed wakes one of the ranks that wait for it.",
            needs="feature:store_queues",
        ),
        woken_by_push,
    ),
)


@world_sizes(1)
@pytest.mark.parametrize("fact", FACTS)
def test_timeouts(bare_ranks: Ranks, fact: Fact, tmp_path: Path) -> None:
    check_store(bare_ranks, fact, tmp_path)


@needs("feature:store_of_processes")
@world_sizes(2, 3)
@pytest.mark.parametrize("fact", OF_RANKS)
def test_what_wakes_others(bare_ranks: Ranks, fact: Fact, tmp_path: Path) -> None:
    check_store(bare_ranks, fact, tmp_path)

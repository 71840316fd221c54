"""What is set, added, compared, appended, listed and deleted, seen by one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from conformance import Chapter, Me, Ranks, world_sizes
from conformance.spec.facts import rows, unlike
from conformance.spec.stores.facts import (
    Fact,
    check_store,
    is_usable,
    raised,
    value_of,
)

DOCS = "torch 2.13 docs, Distributed Key-Value Store"

chapter = Chapter("stores", source=DOCS)

MIB = 1 << 20
ANY_BYTES = bytes(range(256))


def set_and_get(me: Me, store: Any) -> list[str]:
    store.set("key", "first")
    store.set("other", "one")
    store.set("key", "second")
    return unlike("values", [store.get("key"), store.get("other")], [b"second", b"one"])


def any_bytes(me: Me, store: Any) -> list[str]:
    store.set("bytes", ANY_BYTES)
    store.set("text", "zero \0 and ü")
    want = [ANY_BYTES, "zero \0 and ü".encode()]
    return unlike("values", [store.get("bytes"), store.get("text")], want)


def empty_value(me: Me, store: Any) -> list[str]:
    store.set("key", "")
    return unlike("value, is there", (store.get("key"), store.check(["key"])), (b"", True))


def any_key(me: Me, store: Any) -> list[str]:
    names = ["a", "a/b", "/a", "a b", "a\nb", "ü", "a" * 5000, "A", "a/"]
    for name in names:
        store.set(name, repr(name))
    return unlike("values", [store.get(n) for n in names], [repr(n).encode() for n in names])


def one_mib(me: Me, store: Any) -> list[str]:
    store.set("large", "x" * MIB)
    return unlike("is what was set", store.get("large") == b"x" * MIB, True)


def sixteen_mib(me: Me, store: Any) -> list[str]:
    try:
        store.set("large", "x" * (16 * MIB))
        seen = store.get("large") == b"x" * (16 * MIB)
    except Exception as error:
        return [f"16 MiB: {type(error).__name__}: {error}", *is_usable(store)]
    return unlike("is what was set", seen, True)


def add(me: Me, store: Any) -> list[str]:
    seen = [store.add("count", 5), store.add("count", -7), store.add("other", 1)]
    return unlike("sums, and as text", [*seen, store.get("count")], [5, -2, 1, b"-2"])


def add_nothing(me: Me, store: Any) -> list[str]:
    return unlike("sum, is there", (store.add("new", 0), store.check(["new"])), (0, True))


def add_to_what_was_set(me: Me, store: Any) -> list[str]:
    store.set("count", "40")
    return unlike("sum, as text", (store.add("count", 2), store.get("count")), (42, b"42"))


def add_large_numbers(me: Me, store: Any) -> list[str]:
    seen = [store.add("count", 2**62), store.add("count", 2**62 - 1), store.add("down", -(2**63))]
    return unlike("sums", seen, [2**62, 2**63 - 1, -(2**63)])


def add_to_text(me: Me, store: Any) -> list[str]:
    store.set("text", "no number")
    found = [] if raised(lambda: store.add("text", 1), Exception) else ["an error without words"]
    return found + is_usable(store)


def compare_set_of_nothing(me: Me, store: Any) -> list[str]:
    seen = store.compare_set("key", "", "first"), value_of(store, "key")
    return unlike("returned, value", seen, (b"first", b"first"))


def compare_set_equal(me: Me, store: Any) -> list[str]:
    store.set("key", "before")
    seen = store.compare_set("key", "before", "after"), store.get("key")
    return unlike("returned, value", seen, (b"after", b"after"))


def compare_set_unequal(me: Me, store: Any) -> list[str]:
    store.set("key", "before")
    seen = store.compare_set("key", "bef", "after"), store.get("key")
    return unlike("returned, value", seen, (b"before", b"before"))


def compare_set_missing(me: Me, store: Any) -> list[str]:
    seen = store.compare_set("key", "before", "after"), store.check(["key"])
    return unlike("returned, is there", seen, (b"before", False))


def check(me: Me, store: Any) -> list[str]:
    store.set("a", "1")
    store.set("b", "2")
    asked: list[list[str]] = [["a"], ["b", "a"], [], ["a", "c"], ["c"]]
    answers = [store.check(keys) for keys in asked]
    return unlike("answers", answers, [True, True, True, False, False])


def delete(me: Me, store: Any) -> list[str]:
    store.set("a", "1")
    store.set("b", "2")
    seen = store.delete_key("a"), store.check(["a"]), store.check(["b"]), store.get("b")
    return unlike("returned, a, b, value of b", seen, (True, False, True, b"2"))


def delete_nothing(me: Me, store: Any) -> list[str]:
    store.set("a", "1")
    seen = store.delete_key("never set"), store.delete_key("a"), store.delete_key("a")
    return unlike("returned of no key, a, a again", seen, (False, True, False))


def set_again_after_delete(me: Me, store: Any) -> list[str]:
    store.add("a", 5)
    store.delete_key("a")
    return unlike("sum", store.add("a", 1), 1)


def num_keys(me: Me, store: Any) -> list[str]:
    before = store.num_keys()
    store.set("a", "1")
    store.set("a", "2")
    store.add("b", 1)
    more = store.num_keys() - before
    store.delete_key("a")
    return unlike("more, left", (more, store.num_keys() - before), (2, 1))


def list_keys(me: Me, store: Any) -> list[str]:
    before = set(store.list_keys())
    store.set("a/ü", "1")
    store.add("b", 1)
    store.set("c", "3")
    store.delete_key("c")
    return unlike("new keys", sorted({*store.list_keys()} - before), ["a/ü", "b"])


def append(me: Me, store: Any) -> list[str]:
    store.set("set", "one")
    for key in ("set", "new"):
        store.append(key, " two")
        store.append(key, " three")
    return unlike("values", [store.get("set"), store.get("new")], [b"one two three", b" two three"])


def multi(me: Me, store: Any) -> list[str]:
    store.multi_set(["a", "b", "c"], ["1", "", "3"])
    return unlike("values", store.multi_get(["c", "a", "b", "a"]), [b"3", b"1", b"", b"1"])


def multi_set_of_unequal_lengths(me: Me, store: Any) -> list[str]:
    keys = [str(i) for i in range(100_000)]  # so many that what lies behind the values is seen
    found = [] if raised(lambda: store.multi_set(keys, ["1"]), Exception) else ["no words"]
    return found + is_usable(store)


def wrong_types(me: Me, store: Any) -> list[str]:
    for call in (
        lambda: store.set(1, "x"),
        lambda: store.set("x", 1),
        lambda: store.add("x", "1"),
        lambda: store.get(None),
        lambda: store.wait("x", 1),
    ):
        raised(call, TypeError)
    return is_usable(store)


def clone(me: Me, store: Any) -> list[str]:
    store.set("a", "1")
    other = store.clone()
    other.set("b", "2")
    return unlike("values", [value_of(other, "a"), value_of(store, "b")], [b"1", b"2"])


def clone_keeps_the_timeout(me: Me, store: Any) -> list[str]:
    return unlike("timeout", store.clone().timeout, store.timeout)


def prefixes(me: Me, store: Any) -> list[str]:
    one, other = dist.PrefixStore("one", store), dist.PrefixStore("other", store)
    inner = dist.PrefixStore("inner", one)
    one.set("key", "1")
    other.set("key", "2")
    inner.add("key", 3)
    seen = [*(value_of(each, "key") for each in (one, other, inner)), store.check(["key"])]
    found = unlike("values, without a prefix", seen, [b"1", b"2", b"3", False])
    return found + unlike("by its whole name", value_of(store, "one/inner/key"), b"3")


def queue(me: Me, store: Any) -> list[str]:
    for value in ("1", "2", ""):
        store.queue_push("queue", value)
    seen = [store.queue_pop("queue") for _ in range(3)]
    return unlike("values", seen, [b"1", b"2", b""])


def queue_lengths(me: Me, store: Any) -> list[str]:
    seen = [store.queue_len("queue")]
    for value in ("1", "2"):
        store.queue_push("queue", value)
        seen.append(store.queue_len("queue"))
    store.queue_pop("queue")
    seen.append(store.queue_len("queue"))
    return unlike("lengths", seen, [0, 1, 2, 1])


def empty_queue(me: Me, store: Any) -> list[str]:
    store.queue_push("queue", "1")
    store.queue_pop("queue")
    raised(lambda: store.queue_pop("queue", block=False), dist.QueueEmptyError)
    return is_usable(store)


def queues_are_apart(me: Me, store: Any) -> list[str]:
    store.queue_push("a", "1")
    store.queue_push("b", "2")
    seen = store.queue_pop("b"), store.queue_len("a"), store.queue_len("b")
    return unlike("value of b, lengths", seen, (b"2", 1, 0))


FACTS = rows(
    (chapter.must("store/set", "get returns the bytes that were set last."), set_and_get),
    (
        chapter.must("store/any-bytes", "A value is any bytes; a text is stored as UTF-8."),
        any_bytes,
    ),
    (chapter.must("store/empty-value", "A value may be empty, and is there."), empty_value),
    (
        chapter.must(
            "store/any-key",
            "A key is any text that is not empty; keys of which one begins as the other does are "
            "apart.",
        ),
        any_key,
    ),
    (chapter.must("store/one-mib", "A value may have 1 MiB."), one_mib),
    (
        chapter.should(
            "store/sixteen-mib",
            "A value may have 16 MiB, as no documentation names a limit.",
            rests_on="store/one-mib",
        ),
        sixteen_mib,
    ),
    (
        chapter.must(
            "store/add",
            "add begins at 0, returns the new sum, and leaves it as decimal digits for get.",
        ),
        add,
    ),
    (
        chapter.must(
            "store/add-nothing",
            "add of 0 makes the key.",
            source="observed, torch 2.13.0: all stores",
            rests_on="store/add",
        ),
        add_nothing,
    ),
    (
        chapter.must(
            "store/add-to-a-value",
            "add goes on from a number that was set as text.",
            source="observed, torch 2.13.0: all stores",
            rests_on="store/add",
        ),
        add_to_what_was_set,
    ),
    (
        chapter.must(
            "store/add-large", "add counts in 64 bits, with a sign.", rests_on="store/add"
        ),
        add_large_numbers,
    ),
    (
        chapter.must(
            "store/add-to-text",
            "add to a value that is no number raises an error, and the store can be used "
            "afterwards.",
            rests_on="store/add",
        ),
        add_to_text,
    ),
    (
        chapter.must(
            "store/compare-set-new",
            "compare_set with an empty expected value sets a key that is not there, and returns "
            "the new value.",
        ),
        compare_set_of_nothing,
    ),
    (
        chapter.must(
            "store/compare-set-equal",
            "compare_set replaces a value that equals the expected one, and returns the new value.",
        ),
        compare_set_equal,
    ),
    (
        chapter.must(
            "store/compare-set-unequal",
            "compare_set leaves any other value, and returns it.",
        ),
        compare_set_unequal,
    ),
    (
        chapter.must(
            "store/compare-set-missing",
            "compare_set with an expected value sets nothing where the key is not there, and "
            "returns the expected value.",
            source="observed, torch 2.13.0: all stores",
        ),
        compare_set_missing,
    ),
    (chapter.must("store/check", "check says whether all of the keys are there."), check),
    (
        chapter.must(
            "store/delete",
            "delete_key takes the key away and returns True.",
            needs="feature:store_keys",
        ),
        delete,
    ),
    (
        chapter.must(
            "store/delete-nothing",
            "delete_key returns False where there is no such key.",
            needs="feature:store_keys",
            rests_on="store/delete",
        ),
        delete_nothing,
    ),
    (
        chapter.must(
            "store/delete-forgets",
            "A key that was deleted begins anew.",
            needs="feature:store_keys",
            rests_on=("store/delete", "store/add"),
        ),
        set_again_after_delete,
    ),
    (
        chapter.must(
            "store/num-keys",
            "num_keys counts each key once, and none that was deleted.",
            needs="feature:store_keys",
        ),
        num_keys,
    ),
    (
        chapter.must(
            "store/list-keys",
            "list_keys lists the keys that are there.",
            needs="feature:store_keys",
        ),
        list_keys,
    ),
    (
        chapter.must(
            "store/append",
            "append adds to the end of a value, and makes a new one.",
            needs="feature:store_extended",
        ),
        append,
    ),
    (
        chapter.must(
            "store/multi",
            "multi_set sets each key to its value, and multi_get returns the values in the order "
            "of the keys.",
            needs="feature:store_extended",
        ),
        multi,
    ),
    (
        chapter.must(
            "store/multi-set-of-unequal-lengths",
            "multi_set with more keys than values raises an error, and the store can be used "
            "afterwards.",
            needs="feature:store_extended",
            rests_on="store/multi",
        ),
        multi_set_of_unequal_lengths,
    ),
    (
        chapter.should(
            "store/types",
            "A key, a value or a number of another type raises a TypeError, and the store can be "
            "used afterwards.",
            source="observed, torch 2.13.0: all stores",
        ),
        wrong_types,
    ),
    (chapter.must("store/clone", "A clone shares the keys.", needs="feature:store_clone"), clone),
    (
        chapter.must(
            "store/clone-timeout",
            "A clone has the timeout of the store.",
            needs="feature:store_clone",
            rests_on="store/clone",
        ),
        clone_keeps_the_timeout,
    ),
    (
        chapter.must(
            "store/prefix",
            "A PrefixStore puts its prefix and a slash before each key, also around another one.",
        ),
        prefixes,
    ),
    (
        chapter.must(
            "store/queue",
            "Values leave a queue in the order in which they came.",
            needs="feature:store_queues",
        ),
        queue,
    ),
    (
        chapter.must(
            "store/queue-length",
            "queue_len counts the values that are in a queue.",
            needs="feature:store_queues",
        ),
        queue_lengths,
    ),
    (
        chapter.must(
            "store/queue-empty",
            "queue_pop with block=False raises QueueEmptyError where the queue is empty.",
            needs="feature:store_queues",
            rests_on="store/queue",
        ),
        empty_queue,
    ),
    (
        chapter.must(
            "store/queues-apart",
            "Queues of two keys are apart.",
            needs="feature:store_queues",
            rests_on="store/queue",
        ),
        queues_are_apart,
    ),
)


@world_sizes(1)
@pytest.mark.parametrize("fact", FACTS)
def test_values(bare_ranks: Ranks, fact: Fact, tmp_path: Path) -> None:
    check_store(bare_ranks, fact, tmp_path)

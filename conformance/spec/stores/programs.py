"""Random programs of a store's operations, by ranks in turn, against a dictionary."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from conformance import Chapter, Me, Ranks, assert_that, needs, world_sizes
from conformance.spec.facts import unlike
from conformance.spec.stores.facts import (
    PATIENCE_S,
    is_through,
)
from conformance.spec.waiting import all_are_here

chapter = Chapter("stores", source="torch 2.13 docs, Distributed Key-Value Store")

KEYS = ("a", "b", "a/b", "c")
TEXTS = ("", "0", "x", "a longer one")

# The name of the operation and its arguments.
Operation = tuple[str, tuple[Any, ...]]


def _key() -> st.SearchStrategy[str]:
    return st.sampled_from(KEYS)


def _text() -> st.SearchStrategy[str]:
    return st.sampled_from(TEXTS)


def operations() -> st.SearchStrategy[Operation]:
    """Any operation that neither waits nor fails, on texts ("t/") and on numbers ("n/")."""
    text_key, number_key = _key().map("t/{}".format), _key().map("n/{}".format)
    any_key = text_key | number_key
    kinds = {
        "set": st.tuples(text_key, _text()),
        "add": st.tuples(number_key, st.integers(-3, 3)),
        "append": st.tuples(text_key, _text()),
        "compare_set": st.tuples(text_key, _text(), _text()),
        "delete_key": st.tuples(any_key),
        "check": st.tuples(st.lists(any_key, max_size=3)),
        "multi_set": st.lists(st.tuples(text_key, _text()), min_size=1, max_size=3).map(
            lambda pairs: ([key for key, _ in pairs], [text for _, text in pairs])
        ),
    }
    return st.one_of(*(st.tuples(st.just(name), given) for name, given in kinds.items()))


class Model:
    """A dictionary with the methods of a store."""

    def __init__(self) -> None:
        self.held: dict[str, str] = {}

    def set(self, key: str, value: str) -> None:
        self.held[key] = value

    def add(self, key: str, amount: int) -> int:
        total = int(self.held.get(key, "0")) + amount
        self.held[key] = str(total)
        return total

    def append(self, key: str, value: str) -> None:
        self.held[key] = self.held.get(key, "") + value

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        if key not in self.held and expected:
            return expected.encode()
        if self.held.get(key, "") == expected:
            self.held[key] = desired
        return self.held[key].encode()

    def delete_key(self, key: str) -> bool:
        return self.held.pop(key, None) is not None

    def check(self, keys: Sequence[str]) -> bool:
        return all(key in self.held for key in keys)

    def multi_set(self, keys: Sequence[str], values: Sequence[str]) -> None:
        self.held.update(zip(keys, values, strict=True))


def performed(
    me: Me, program: Sequence[tuple[int, Operation]], folder: str
) -> tuple[list[Any], dict[str, bytes]]:
    """What this rank's own operations returned, and what it finds in the store at the end."""
    # The number of this run in the world: its store and its keys are of no other run.
    own = Path(folder) / str(me.store.add(f"runs of rank {me.rank}", 1))
    own.mkdir(exist_ok=True)
    store = me.shared_store(str(own), timedelta(seconds=PATIENCE_S))
    returned = []
    for number, (rank, (name, arguments)) in enumerate(program):
        if me.rank == rank % me.world_size:
            returned.append(getattr(store, name)(*arguments))
            is_through(store)
        all_are_here(me, f"{own} {number}")
    names = [f"{kind}/{key}" for kind in "tn" for key in KEYS]
    left = {name: store.get(name) for name in names if store.check([name])}
    all_are_here(me, f"{own} read")
    return returned, left


@needs("feature:store_of_processes", "feature:store_extended", "feature:store_keys")
@chapter.must(
    "store/any-program",
    "Any sequence of operations, by any rank after the other, does what it does to a dictionary.",
)
@world_sizes(2)
@settings(max_examples=20)
@given(
    program=st.lists(st.tuples(st.integers(0, 1), operations()), min_size=1, max_size=12).map(tuple)
)
def test_any_program(
    bare_ranks: Ranks, tmp_path: Path, program: tuple[tuple[int, Operation], ...]
) -> None:
    model = Model()
    want: list[list[Any]] = [[] for _ in range(bare_ranks.world_size)]
    for rank, (name, arguments) in program:
        want[rank % bare_ranks.world_size].append(getattr(model, name)(*arguments))
    left = {key: value.encode() for key, value in model.held.items()}
    for rank, got in enumerate(bare_ranks.run(performed, program, str(tmp_path))):
        found = [
            *unlike("returned", got[0], want[rank]),
            *unlike("values at the end", sorted(got[1].items()), sorted(left.items())),
        ]
        assert_that(not found, "\n".join(found), rank)

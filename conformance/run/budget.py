"""Orders cases for `--budget`, and chooses some for `--cases-per-rule`: few cases, many rules."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest

import pytest

from conformance.run.plan import Plan, world_size_of

# Chapters whose cases wait for timeouts or for ranks that die.
_WAITING = "faults"


def most_rules_first(
    items: Sequence[pytest.Item], plans: Mapping[str, Plan], per_rule: int | None = None
) -> list[pytest.Item]:
    """The items in rounds: each round has one more case of every rule that has one left.

    per_rule: how many rounds there are; None for as many as it takes.

    In each round cases that take long come last; otherwise the given order is kept, which has
    roots first. So wherever the run ends, few rules are without a case.
    """
    rounds: list[list[pytest.Item]] = []
    done: dict[str, int] = {}
    for item in _varied(items, plans):
        covers = plans[item.nodeid].covers
        number = min((done.get(id, 0) for id in covers), default=0)
        for id in covers:
            done[id] = done.get(id, 0) + 1
        while len(rounds) <= number:
            rounds.append([])
        rounds[number].append(item)
    order = {item.nodeid: at for at, item in enumerate(items)}
    if per_rule is not None:
        del rounds[per_rule:]
    for found in rounds:
        found.sort(key=lambda item: (_takes_long(item), order[item.nodeid]))
    return [item for found in rounds for item in found]


def _varied(items: Sequence[pytest.Item], plans: Mapping[str, Plan]) -> Iterator[pytest.Item]:
    """The items, those that take long last. Of the cases of the same rules, each has another world
    size than the one before, if there are several, and other parameters.
    """
    by_rules: dict[tuple[bool, tuple[str, ...]], dict[int, deque[pytest.Item]]] = {}
    for item in sorted(items, key=_cost):
        by_size = by_rules.setdefault((_takes_long(item), plans[item.nodeid].covers), {})
        by_size.setdefault(world_size_of(item) or 0, deque()).append(item)
    for by_size in by_rules.values():
        for number, of_size in enumerate(by_size.values()):
            of_size.rotate(-number)
        for one_of_each_size in zip_longest(*by_size.values()):
            yield from filter(None, one_of_each_size)


def _cost(item: pytest.Item) -> tuple[bool, int]:
    """Which of the cases of one rule is the first; a single rank says least."""
    size = world_size_of(item) or 0
    return _takes_long(item), size if size > 1 else 99


def _takes_long(item: pytest.Item) -> bool:
    is_drawn = getattr(getattr(item, "obj", None), "is_hypothesis_test", False)
    return is_drawn or item.path.parent.name == _WAITING

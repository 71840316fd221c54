"""Orders cases for `--budget`, and chooses some for `--cases-per-rule`: few cases, many rules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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
    for item in sorted(items, key=_cost):
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


def _cost(item: pytest.Item) -> tuple[bool, int]:
    """Which of the cases of one rule is the first; a single rank says least."""
    size = world_size_of(item) or 0
    return _takes_long(item), size if size > 1 else 99


def _takes_long(item: pytest.Item) -> bool:
    is_drawn = getattr(getattr(item, "obj", None), "is_hypothesis_test", False)
    return is_drawn or item.path.parent.name == _WAITING

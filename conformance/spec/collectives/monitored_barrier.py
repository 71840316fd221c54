"""monitored_barrier: what it waits for, and which missing ranks it names.

`dist.monitored_barrier` itself serves the backend that is called "gloo" alone. A group of any
other backend is asked by its own method of that name, to which `dist` would hand the call on.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
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
    assert_that,
    covers,
    deadline,
    needs,
    not_probed,
    world_sizes,
)
from conformance.spec.collectives.store_sync import tick, wait_for_ticks

chapter = Chapter("collectives", needs="op:monitored_barrier")


_LONG = timedelta(seconds=60)
_SHORT = timedelta(seconds=1)  # enough for ranks that come at all


def monitored_barrier(
    group: Any = None, timeout: timedelta = _LONG, wait_all_ranks: bool = False
) -> Any:
    """By torch's function where it serves the backend, by the group's method elsewhere."""
    if dist.get_backend(group) == dist.Backend.GLOO:
        return dist.monitored_barrier(group, timeout, wait_all_ranks)
    chosen: Any = group or dist.group.WORLD
    return chosen.monitored_barrier(timeout, wait_all_ranks)


def passes(me: Me) -> list[object]:
    return [monitored_barrier(), monitored_barrier(wait_all_ranks=True), monitored_barrier()]


@chapter.must(
    "monitored_barrier/passes",
    "monitored_barrier returns None on every rank once all have called it.",
    source="torch 2.13 docs, monitored_barrier",
)
@world_sizes(1, 2, 3, 5, at_least=1)
def test_all_pass(ranks: Ranks) -> None:
    assert_each_rank(ranks.run(passes), [[None] * 3] * ranks.world_size)


def after_messages_of_some(me: Me) -> Any:
    """Messages go between ranks 0 and 1 alone, so ranks have sent and received as many or none."""
    x = torch.ones(2, device=me.device)
    for _ in range(3):
        if me.rank == 1:
            dist.send(x, 0)
        elif me.rank == 0:
            dist.recv(x, 1)
    return monitored_barrier()


@covers("monitored_barrier/passes")
@world_sizes(3)
@deadline(20)
@needs("op:send")
def test_all_pass_after_messages_of_some(ranks: Ranks) -> None:
    assert_each_rank(ranks.run(after_messages_of_some), [None] * 3)


def some_are_missing(me: Me, missing: Sequence[int], wait_all_ranks: bool) -> str:
    """The error of a rank that came; "passed" if there was none, "missing" where it did not come.

    Those that are missing stay until the others are told, so that no rank sees them go.
    """
    told = "missing"
    if me.rank not in missing:
        try:
            monitored_barrier(None, _SHORT, wait_all_ranks)
            told = "passed"
        except RuntimeError as error:
            told = str(error)
        tick(me.store, "told", of=me.world_size - len(missing))
    wait_for_ticks(me.store, "told")
    return told


@chapter.must(
    "monitored_barrier/names-a-missing-rank",
    "When monitored_barrier fails, rank 0's error names the first rank that did not arrive, and "
    "the timeout.",
    source="torch 2.13 docs, monitored_barrier: 'Rank 2 failed to pass monitoredBarrier in 500 ms'",
    rests_on="monitored_barrier/passes",
)
@not_probed()
@world_sizes(4)
@pytest.mark.parametrize(("missing", "first"), [([2], 2), ([3], 3), ([1, 3], 1)], ids=str)
def test_rank_0_names_the_first_missing_rank(ranks: Ranks, missing: list[int], first: int) -> None:
    words = ranks.run(some_are_missing, missing, False)[0]
    said = re.search(rf"Rank {first} failed to pass monitoredBarrier in 1000 ms", words)
    assert_that(bool(said), f"rank 0 was told {words!r}", 0)


@chapter.must(
    "monitored_barrier/names-all-missing-ranks",
    "With wait_all_ranks, rank 0's error names every rank that did not arrive, in ascending order.",
    source="pytorch#55009, pytorch#55010",
    rests_on="monitored_barrier/passes",
)
@not_probed()
@world_sizes(5)
@pytest.mark.parametrize("missing", [[3, 1], [4, 2, 1]], ids=str)
def test_rank_0_names_all_missing_ranks_in_order(ranks: Ranks, missing: list[int]) -> None:
    words = ranks.run(some_are_missing, missing, True)[0]
    names = ", ".join(map(str, sorted(missing)))
    said = re.search(rf"Ranks {names} failed to pass monitoredBarrier in 1000 ms", words)
    assert_that(bool(said), f"rank 0 was told {words!r}", 0)


@chapter.must(
    "monitored_barrier/nobody-leaves",
    "No rank passes monitored_barrier while another one is missing, whichever ranks these are.",
    source="pytorch#55197",
    rests_on="monitored_barrier/passes",
)
@not_probed()
@world_sizes(3)
@pytest.mark.parametrize("missing", [[2], [1], [1, 2]], ids=str)
@pytest.mark.parametrize("wait_all_ranks", [False, True], ids=["first", "all"])
def test_no_rank_passes_while_another_is_missing(
    ranks: Ranks, missing: list[int], wait_all_ranks: bool
) -> None:
    for rank, told in enumerate(ranks.run(some_are_missing, missing, wait_all_ranks)):
        assert_that(told != "passed", f"passed although ranks {missing} never came", rank)


@chapter.should(
    "monitored_barrier/healthy-ranks-are-told",
    "When monitored_barrier fails, the error of a rank that did arrive says so, and refers to "
    "rank 0 for details.",
    source="observed, torch 2.13.0 gloo: 'successfully reached monitoredBarrier'",
    rests_on="monitored_barrier/passes",
)
@not_probed()
@world_sizes(3)
def test_a_healthy_rank_is_told_that_it_is(ranks: Ranks) -> None:
    words = ranks.run(some_are_missing, [2], False)[1]
    said = re.search(r"Rank 1 successfully reached monitoredBarrier.*rank 0", words, re.DOTALL)
    assert_that(bool(said), f"rank 1 was told {words!r}", 1)


def in_a_group(me: Me, members: Sequence[int]) -> str | None:
    group = dist.new_group(list(members))
    if me.rank not in members:
        me.store.wait(["over"])
        return None
    try:
        monitored_barrier(group)
    finally:
        me.store.set("over", "")
    return "passed"


@chapter.must(
    "monitored_barrier/subgroup",
    "monitored_barrier in a group waits only for the members of that group.",
    source="torch 2.13 docs, monitored_barrier",
    rests_on="monitored_barrier/passes",
)
@world_sizes(4)
def test_a_group_waits_for_its_own_members(ranks: Ranks) -> None:
    got = ranks.run(in_a_group, [1, 3])
    assert_each_rank(got, [None, "passed", None, "passed"])


def one_of_a_group_is_missing(me: Me, members: Sequence[int]) -> str:
    """The error of the group's first member, where the last one does not come."""
    group = dist.new_group(list(members))
    told = ""
    if me.rank in members[:-1]:
        try:
            monitored_barrier(group, _SHORT)
        except RuntimeError as error:
            told = str(error)
        tick(me.store, "told", of=len(members) - 1)
    wait_for_ticks(me.store, "told")
    return told


@chapter.should(
    "monitored_barrier/names-ranks-of-the-group",
    "monitored_barrier in a group names missing ranks by their rank in the group.",
    source="observed, torch 2.13.0 gloo",
    rests_on=("monitored_barrier/subgroup", "monitored_barrier/names-a-missing-rank"),
)
@not_probed()
@world_sizes(4)
@pytest.mark.parametrize(("members", "name"), [([1, 3], 1), ([0, 2, 3], 2)], ids=str)
def test_the_first_of_a_group_names_ranks_of_the_group(
    ranks: Ranks, members: list[int], name: int
) -> None:
    words = ranks.run(one_of_a_group_is_missing, members)[members[0]]
    said = re.search(rf"Rank {name} failed to pass monitoredBarrier in 1000 ms", words)
    assert_that(bool(said), f"the first member was told {words!r}", members[0])


def between_collectives(me: Me) -> Tensor:
    x = torch.full((3,), me.rank + 1.0, device=me.device)
    for _ in range(3):
        work = dist.all_reduce(x, async_op=True)
        monitored_barrier()
        work.wait()
    return x


@chapter.must(
    "monitored_barrier/between-collectives",
    "monitored_barrier and collectives of the same group do not disturb each other.",
    source="torch 2.13 docs, monitored_barrier: 'can be inserted before the collective calls'",
    rests_on=("monitored_barrier/passes", "all_reduce/sum"),
)
@world_sizes(2, 3)
def test_collectives_around_it(ranks: Ranks) -> None:
    n = ranks.world_size
    want = torch.full((3,), n * (n + 1) / 2 * n * n)
    assert_each_rank(ranks.run(between_collectives), [want] * n)


def wrong_timeout(me: Me) -> str:
    try:
        timeout: Any = "soon"
        monitored_barrier(None, timeout)
    except TypeError:
        return "TypeError"
    return "taken"


@chapter.must(
    "arguments/timeout",
    "monitored_barrier refuses a timeout that is neither a timedelta nor a number of seconds.",
    source="torch 2.13, _check_valid_timeout",
    rests_on="monitored_barrier/passes",
)
@not_probed()
@world_sizes(2)
def test_a_timeout_must_be_a_timedelta(ranks: Ranks) -> None:
    assert_each_rank(ranks.run(wrong_timeout), ["TypeError"] * 2)

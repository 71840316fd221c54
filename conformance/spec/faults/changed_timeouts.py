"""set_timeout: a group's timeout is changed between operations.

None of these cases is probed: a target without timeouts waits for ever.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from conformance import (
    Chapter,
    Me,
    Ranks,
    assert_same_on_all_ranks,
    covers,
    deadline,
    needs,
    not_probed,
    world_sizes,
)
from conformance.spec.faults.giving_up import (
    GROUP_TIMEOUT_S,
    wait_at_a_root,
    wait_in_every_collective,
)
from conformance.spec.faults.operations import ALL_NEEDED
from conformance.spec.groups.membership_sums import mark, sum_marks, sum_of_marks
from conformance.spec.groups.starting import start

chapter = Chapter("faults", needs="feature:timeouts")

pytestmark = not_probed()


def shorten_the_timeout(me: Me, where: str, how: str) -> None:
    """From minutes to 200 ms for one operation that no other rank joins."""
    start(me, "here")
    group: Any = dist.group.WORLD if where == "default" else dist.new_group()
    sum_marks(me, group)
    if me.rank == 0:
        group.set_timeout(timedelta(milliseconds=200))
        calls: dict[str, Callable[[], object]] = {
            "all_reduce": lambda: dist.all_reduce(mark(me), group=group),
            "wait": lambda: dist.all_reduce(mark(me), group=group, async_op=True).wait(),
            "recv": lambda: dist.recv(mark(me), 1, group=group),
        }
        with pytest.raises(RuntimeError):
            calls[how]()
        me.store.set("rank 0 is through", "1")
    me.store.wait(["rank 0 is through"])


_HOW = [
    pytest.param("all_reduce", marks=covers("timeouts/changed")),
    pytest.param("wait", marks=covers("timeouts/changed")),
    pytest.param(
        "recv",
        marks=chapter.should(
            "timeouts/shortened-for-messages",
            "A shorter timeout set by set_timeout applies to a recv that follows.",
            source="torch 2.13, ProcessGroup.set_timeout: 'Sets the default timeout for all future "
            "operations.'",
            rests_on=("timeouts/changed", "timeouts/point-to-point"),
        ),
    ),
]


@world_sizes(2)
@deadline(10)
@pytest.mark.parametrize("how", _HOW)
@pytest.mark.parametrize("where", ["default", "subgroup"])
def test_a_shorter_timeout_counts(bare_ranks: Ranks, where: str, how: str) -> None:
    bare_ranks.run(shorten_the_timeout, where, how)


def lengthen_the_timeout(me: Me, names: Sequence[str]) -> list[Tensor | str]:
    """From two seconds to minutes; rank 1 comes to everything when two seconds are over. Returns
    what each operation brought, or its error."""
    short, long = timedelta(seconds=GROUP_TIMEOUT_S), timedelta(minutes=5)
    start(me, "here", timeout=short)
    groups: dict[str, Any] = {
        name: dist.group.WORLD if name == "default group" else dist.new_group(timeout=short)
        for name in names
    }
    for group in groups.values():
        sum_marks(me, group)
        group.set_timeout(long)
    brought: dict[str, Tensor | str] = {}

    def attempt(name: str) -> None:
        x, group = mark(me), groups[name]
        try:
            if name == "wait":
                dist.all_reduce(x, group=group, async_op=True).wait()
            elif name != "recv":
                dist.all_reduce(x, group=group)
            elif me.rank == 0:
                dist.recv(x, 1, group=group)
            else:
                dist.send(x, 0, group=group)
        except RuntimeError as error:
            brought[name] = f"raised {error!r}"
        else:
            brought[name] = x

    if me.rank == 1:
        me.store.wait(["rank 0 begins"])
        time.sleep(GROUP_TIMEOUT_S + 0.5)  # this is what it means to be late
    me.store.set(f"rank {me.rank} begins", "1")
    threads = [threading.Thread(target=attempt, args=(name,)) for name in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [brought[name] for name in names]


@chapter.must(
    "timeouts/changed",
    "set_timeout of a group, the default one or another, applies to the collectives that follow, "
    "whether it is shorter or longer than before, and whether they are blocking or asynchronous.",
    source="pytorch#167052; torch 2.13, ProcessGroup.set_timeout",
    rests_on="timeouts/of-the-group",
)
@world_sizes(2)
@deadline(20)
def test_a_longer_timeout_counts(bare_ranks: Ranks) -> None:
    got = bare_ranks.run(lengthen_the_timeout, ["default group", "all_reduce", "wait"])
    assert_same_on_all_ranks(got, want=[sum_of_marks([0, 1])] * 3)


@covers("timeouts/changed")
@world_sizes(2)
@deadline(20)
@needs(*ALL_NEEDED)
@pytest.mark.parametrize("wait", [wait_in_every_collective, wait_at_a_root])
def test_a_shorter_timeout_counts_for_every_collective(
    ranks: Ranks, wait: Callable[[Me, bool], dict[str, str]]
) -> None:
    assert_same_on_all_ranks(ranks.run(wait, True), want={})


@chapter.should(
    "timeouts/lengthened-for-messages",
    "A longer timeout set by set_timeout applies to a recv that follows.",
    source="torch 2.13, ProcessGroup.set_timeout: 'Sets the default timeout for all future "
    "operations.'",
    rests_on=("timeouts/changed", "timeouts/point-to-point"),
)
@world_sizes(2)
@deadline(20)
@needs("op:send")
def test_a_longer_timeout_counts_for_messages(bare_ranks: Ranks) -> None:
    got = bare_ranks.run(lengthen_the_timeout, ["recv"])
    assert_same_on_all_ranks(got, want=[sum_of_marks([1])])

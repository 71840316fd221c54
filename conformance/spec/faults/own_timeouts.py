"""Timeouts of single calls, in the options of calls on the group itself.

None of these cases is probed: a target without timeouts waits for ever.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

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
from conformance.spec.faults.giving_up import GROUP_TIMEOUT_S, RETURNED, call_at_once
from conformance.spec.groups.membership_sums import sum_marks

chapter = Chapter("faults", needs="feature:timeouts")

pytestmark = not_probed()

_BRIEF_S = 0.5


# Rank 0 needs something of rank 1 in each. By method: its options, and the root if it has one.
_METHODS: dict[str, tuple[Callable[[], Any], int | None]] = {
    "allreduce": (dist.AllreduceOptions, None),
    "reduce_scatter": (dist.ReduceScatterOptions, None),
    "broadcast": (dist.BroadcastOptions, 1),
    "scatter": (dist.ScatterOptions, 1),
    "reduce": (dist.ReduceOptions, 0),
    "gather": (dist.GatherOptions, 0),
}


def _call(method: str, timeout: timedelta, me: Me, group: Any) -> None:
    """The method of the group, with the timeout in its options, and the wait for it."""
    make_options, root = _METHODS[method]
    options = make_options()
    options.timeout = timeout
    if root is not None:
        options.rootRank = root
    x = torch.ones(100, device=me.device)
    parts = [torch.ones(100, device=me.device) for _ in range(me.world_size)]
    at_root = [parts] if me.rank == root else []
    tensors: dict[str, tuple[Any, ...]] = {
        "reduce_scatter": ([x], [parts]),
        "scatter": ([x], at_root),
        "gather": (at_root, [x]),
    }
    getattr(group, method)(*tensors.get(method, ([x],)), options).wait()


def _calls(me: Me, timeout_s: float) -> dict[str, Callable[[Any], None]]:
    timeout = timedelta(seconds=timeout_s)
    return {method: partial(_call, method, timeout, me) for method in _METHODS}


def wait_briefly_in_each(me: Me) -> dict[str, str]:
    """Rank 0 alone, in groups with the timeout of the harness, which is minutes."""
    groups = {method: dist.new_group() for method in _METHODS}
    for group in groups.values():
        sum_marks(me, group)
    wrong = {}
    if me.rank == 0:
        for method, ending in call_at_once(_calls(me, _BRIEF_S), groups).items():
            took_s = ending.ended_s - ending.began_s
            if ending.error is None:
                wrong[method] = RETURNED
            elif not isinstance(ending.error, RuntimeError):
                wrong[method] = f"raised {ending.error!r}"
            elif took_s < 0.75 * _BRIEF_S:  # a quarter for coarse timers
                wrong[method] = f"gave up after {took_s:.2f} s of {_BRIEF_S} s"
        me.store.set("rank 0 is through", "1")
    me.store.wait(["rank 0 is through"])
    return wrong


@chapter.should(
    "timeouts/of-a-call",
    "The timeout in the options of a collective that is called on the group itself applies to this "
    "call, whether it is shorter or longer than the group's.",
    source="torch 2.13, ProcessGroup.allreduce and others, opts.timeout",
    rests_on="timeouts/of-the-group",
)
@world_sizes(2)
@deadline(15)
@needs("op:broadcast", "op:scatter", "op:reduce", "op:gather", "op:reduce_scatter")
def test_a_call_has_a_timeout_of_its_own(ranks: Ranks) -> None:
    assert_same_on_all_ranks(ranks.run(wait_briefly_in_each), want={})


def wait_long_in_each(me: Me) -> dict[str, str]:
    """Rank 1 comes when the groups' timeout is over, and rank 0 waits for up to a minute."""
    timeout = timedelta(seconds=GROUP_TIMEOUT_S)
    groups = {method: dist.new_group(timeout=timeout) for method in _METHODS}
    for group in groups.values():
        sum_marks(me, group)
    if me.rank == 0:
        me.store.set("rank 0 waits", "1")
    else:
        me.store.wait(["rank 0 waits"])
        time.sleep(GROUP_TIMEOUT_S + 0.5)  # being late
    endings = call_at_once(_calls(me, 60), groups)
    return {method: repr(ending.error) for method, ending in endings.items() if ending.error}


@covers("timeouts/of-a-call")
@world_sizes(2)
@deadline(20)
@needs("op:broadcast", "op:scatter", "op:reduce", "op:gather", "op:reduce_scatter")
def test_a_call_may_wait_longer_than_its_group(ranks: Ranks) -> None:
    assert_same_on_all_ranks(ranks.run(wait_long_in_each), want={})

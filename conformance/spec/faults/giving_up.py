"""Calls that no other rank joins, each in a group of its own: do they give up, and when?"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from conformance import Me
from conformance.spec.collectives.perform import all_gather_into_tensor, reduce_scatter_tensor
from conformance.spec.faults.operations import OPERATIONS
from conformance.spec.groups.membership_sums import sum_marks

# Long enough to make a group within it on a busy machine.
GROUP_TIMEOUT_S = 3.0

RETURNED = "returned"


@dataclass(frozen=True)
class Ending:
    """When a call began and ended, on a clock that all ranks have, and what it raised."""

    began_s: float
    ended_s: float
    error: Exception | None


def ending_of(call: Callable[[], object]) -> Ending:
    """Make the call."""
    began_s = time.time()
    error = None
    try:
        call()
    except Exception as raised:
        error = raised
    return Ending(began_s, time.time(), error)


def call_at_once(
    calls: Mapping[str, Callable[[Any], object]], groups: Mapping[str, Any]
) -> dict[str, Ending]:
    """Make every call at the same time, each in a thread, with the group of its name."""
    endings: dict[str, Ending] = {}

    def attempt(name: str) -> None:
        endings[name] = ending_of(lambda: calls[name](groups[name]))

    threads = [threading.Thread(target=attempt, args=(name,)) for name in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return endings


def try_all(
    me: Me,
    names: Sequence[str],
    calls: Mapping[str, Callable[[Any], object]],
    *,
    changed: bool = False,
    first: Mapping[str, Callable[[Any], object]] | None = None,
) -> dict[str, str]:
    """Make every call at once, each in a thread and a group of its own; those that end wrongly.

    No other rank ends them, and they should end by themselves when the timeout of the rank that
    began first is over.

    names: of all groups, the same on every rank.
    calls: those of this rank, which may be none: then it makes the groups, and waits until the
        other ranks are through.
    changed: the groups have the timeout from set_timeout, after a first operation.
    first: what all ranks do twice in these groups before.
    """
    timeout = timedelta(seconds=GROUP_TIMEOUT_S)
    groups: dict[str, Any] = {
        name: dist.new_group(timeout=timedelta(minutes=5) if changed else timeout) for name in names
    }
    for group in groups.values() if changed else ():
        sum_marks(me, group)
        group.set_timeout(timeout)
    for name, call in (first or {}).items():
        for _ in range(2):
            call(groups[name])
    endings = call_at_once(calls, groups)
    began_s = {name: ending.began_s for name, ending in endings.items()}
    me.store.set(f"rank {me.rank} is through", json.dumps(began_s))
    began_by_rank = [
        json.loads(me.store.get(f"rank {rank} is through")) for rank in range(me.world_size)
    ]
    wrong = {}
    for name, ending in endings.items():
        first_s = min(began[name] for began in began_by_rank if name in began)
        took_s = ending.ended_s - first_s
        if ending.error is None:
            wrong[name] = RETURNED
        elif not isinstance(ending.error, RuntimeError):
            wrong[name] = f"raised {ending.error!r}"
        elif took_s < 0.75 * GROUP_TIMEOUT_S:  # a quarter for coarse timers
            wrong[name] = f"gave up after {took_s:.2f} s of {GROUP_TIMEOUT_S} s"
    return wrong


def wait_in_every_collective(me: Me, changed: bool = False) -> dict[str, str]:
    """The last rank comes to none of them."""
    # A root's sends, and a gathering's contributions, may be complete before others need them.
    one_sided = {"broadcast", "scatter", "reduce", "gather"}
    names = [name for name in OPERATIONS if name not in one_sided]
    absent = me.rank == me.world_size - 1
    calls = {} if absent else {name: partial(OPERATIONS[name], me) for name in names}
    return try_all(me, names, calls, changed=changed)


def wait_at_a_root(me: Me, changed: bool = False) -> dict[str, str]:
    """Rooted collectives whose root, or a contributor to whose root, does not come."""
    absent = me.world_size - 1
    names = ["broadcast", "scatter", "reduce", "gather"]
    if me.rank == absent:
        return try_all(me, names, {}, changed=changed)
    calls = {name: partial(OPERATIONS[name], me, root=absent) for name in ("broadcast", "scatter")}
    if me.rank == 0:
        calls |= {name: partial(OPERATIONS[name], me) for name in ("reduce", "gather")}
    return try_all(me, names, calls, changed=changed)


def wait_in_coalesced_calls(me: Me) -> dict[str, str]:
    """The last rank has no part in the third of each."""
    n = me.world_size

    def several(*sizes: int) -> list[torch.Tensor]:
        return [torch.ones(size, device=me.device) for size in sizes]

    def listed(group: Any) -> None:
        dist.all_reduce_coalesced(several(4, 4), group=group)

    def managed(call: Callable[..., object], *sizes: int) -> Callable[[Any], None]:
        def made(group: Any) -> None:
            with dist._coalescing_manager(group):
                for _ in range(2):
                    call(*several(*sizes), group=group)

        return made

    calls: dict[str, Callable[[Any], object]] = {
        "all_reduce_coalesced": listed,
        "all_reduce": managed(dist.all_reduce, 4),
        "all_gather_into_tensor": managed(all_gather_into_tensor, 4 * n, 4),
        "reduce_scatter_tensor": managed(reduce_scatter_tensor, 4, 4 * n),
    }
    return try_all(me, list(calls), {} if me.rank == n - 1 else calls, first=calls)

"""`ProcessGroupGloo.reconfigure`: other members of a group that exists, and what is refused."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from impl import errors
from impl.gloo import Options, ProcessGroupGloo
from impl.gloo.connect.membership import global_rank_of, in_order, new_handle
from tests.impl.threads import on_threads


def options(number: int, handles: Collection[str], timeout_s: float | None = None) -> Any:
    """As torch's `ReconfigureOptions`, which torch 2.15 has."""
    timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
    return SimpleNamespace(uuid=number, handles=handles, timeout=timeout, hints={})


def summed(group: ProcessGroupGloo) -> tuple[int, int, float]:
    x = torch.tensor([2.0 ** global_rank_of(group.get_reconfigure_handle())])
    group.allreduce([x]).wait()
    return group.rank(), group.size(), x.item()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("is_connected", [False, True])
def test_members_come_and_go(transport: str, is_connected: bool) -> None:
    store = dist.HashStore()
    handles: dict[int, str] = {}
    have_all = threading.Barrier(3)

    def run(rank: int) -> list[Any]:
        how = Options(timedelta(seconds=30), transport, hostname="127.0.0.1")
        group = ProcessGroupGloo(store, rank, 3, options=how, name="g", is_connected=is_connected)
        handles[rank] = group.get_reconfigure_handle()
        have_all.wait()
        seen: list[Any] = []
        for number, members in enumerate([[2, 0, 1], [0, 2], [1, 2, 0]]):
            have_all.wait()
            if rank in members:
                group.reconfigure(options(number, [handles[m] for m in members])).wait()
                seen.append(summed(group))
            have_all.wait()
        group.shutdown()
        return seen

    assert on_threads(3, run) == [
        [(1, 3, 7), (0, 2, 5), (2, 3, 7)],
        [(2, 3, 7), (0, 3, 7)],
        [(0, 3, 7), (1, 2, 5), (1, 3, 7)],
    ]


def alone(is_connected: bool = True) -> ProcessGroupGloo:
    how = Options(timedelta(seconds=30), "shm")
    return ProcessGroupGloo(
        dist.HashStore(), 0, 1, options=how, name="g", is_connected=is_connected
    )


def test_a_group_without_members_issues_nothing() -> None:
    group = alone(is_connected=False)
    calls: list[Callable[[], dist.Work]] = [
        lambda: group.allreduce([torch.ones(1)]),
        lambda: group.barrier(),
        lambda: group.send([torch.ones(1)], 0, 0),
    ]
    for call in calls:
        said = "has not been initialized.*group 'g', rank 0 of 1"
        with pytest.raises(RuntimeError, match=said):
            call().wait()
    group.shutdown()


def test_numbers_are_used_once() -> None:
    group = alone()
    for number in (5, 3):
        group.reconfigure(options(number, [group.get_reconfigure_handle()])).wait()
    for number in (5, 3):
        with pytest.raises(RuntimeError, match=f"uuid {number} was already used"):
            group.reconfigure(options(number, [group.get_reconfigure_handle()]))
    assert summed(group) == (0, 1, 1.0)
    group.shutdown()


def test_a_member_that_does_not_come_is_waited_for_as_long_as_was_asked() -> None:
    group = alone()
    mine = group.get_reconfigure_handle()
    with pytest.raises(errors.CollectiveTimeout):
        group.reconfigure(options(1, [mine, new_handle(1)], timeout_s=0.2))
    with pytest.raises(RuntimeError, match="was destroyed"):
        summed(group)
    group.reconfigure(options(2, {mine})).wait()
    assert summed(group) == (0, 1, 1.0)
    group.shutdown()


def test_a_set_is_in_the_order_of_global_ranks() -> None:
    handles = [new_handle(rank) for rank in (3, 12, 0)]
    assert [global_rank_of(h) for h in in_order(set(handles), handles[0])] == [0, 3, 12]
    assert in_order(handles, handles[0]) == handles


@pytest.mark.parametrize(
    ("handles", "words"),
    [
        ([], "at least one handle"),
        (["pygloo:1"], "Invalid pygloo reconfigure handle: pygloo:1"),
        (["gloo:0:1:0"], "Invalid pygloo"),
        (["pygloo:-1:ab"], "Invalid pygloo"),
        (["pygloo:1:ab"], "is not part of the new communicator"),
        (["pygloo:0:ab", "pygloo:0:ab"], "must be unique"),
    ],
)
def test_what_names_no_members_is_refused(handles: list[str], words: str) -> None:
    with pytest.raises(RuntimeError, match=words):
        in_order(handles, "pygloo:0:ab")

"""What a group costs in the long run, and what its ranks see when one of them is killed."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import impl.gloo
from impl import errors
from tests.impl.gloo.ranks import on_processes

TIMEOUT = timedelta(seconds=30)
SIZES = (1, 2, 30, 199)  # few, so that warming up fills what is kept by size
PAGE_NBYTES = os.sysconf("SC_PAGE_SIZE")

Group = dist.ProcessGroup
Operation = Callable[[Group, Tensor, bool], Any]  # a Work if asked to be asynchronous


def all_gather(group: Group, x: Tensor, asynchronous: bool) -> Any:
    whole = x.new_empty(group.size() * x.numel())
    return dist.all_gather_into_tensor(whole, x, group, asynchronous)


def reduce_scatter(group: Group, x: Tensor, asynchronous: bool) -> Any:
    whole = x.repeat(group.size())
    return dist.reduce_scatter_tensor(x, whole, group=group, async_op=asynchronous)


def all_to_all(group: Group, x: Tensor, asynchronous: bool) -> Any:
    whole = x.repeat(group.size())
    return dist.all_to_all_single(torch.empty_like(whole), whole, None, None, group, asynchronous)


def gather(group: Group, x: Tensor, asynchronous: bool) -> Any:
    rows = [torch.empty_like(x) for _ in range(group.size())] if group.rank() == 0 else None
    return dist.gather(x, rows, group=group, async_op=asynchronous, group_dst=0)


def scatter(group: Group, x: Tensor, asynchronous: bool) -> Any:
    rows = [x.clone() for _ in range(group.size())] if group.rank() == 0 else None
    return dist.scatter(x, rows, group=group, async_op=asynchronous, group_src=0)


OPERATIONS: dict[str, Operation] = {
    "all_reduce": lambda group, x, later: dist.all_reduce(x, group=group, async_op=later),
    "reduce": lambda group, x, later: dist.reduce(x, group=group, async_op=later, group_dst=0),
    "broadcast": lambda group, x, later: dist.broadcast(
        x, group=group, async_op=later, group_src=0
    ),
    "barrier": lambda group, x, later: dist.barrier(group, later),
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
    "all_to_all": all_to_all,
    "gather": gather,
    "scatter": scatter,
}


def join(rank: int, world_size: int, path: str, transport: str) -> None:
    dist.init_process_group(
        "pygloo",
        store=dist.FileStore(path, world_size),
        rank=rank,
        world_size=world_size,
        timeout=TIMEOUT,
        pg_options=impl.gloo.Options(TIMEOUT, transport),
    )


def world() -> Group:
    group = dist.group.WORLD
    assert group is not None
    return group


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def resident_nbytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_NBYTES


def random_collectives(groups: list[Group], count: int, seed: int) -> None:
    """The same calls in the same order on every rank; up to eight of them in flight at once."""
    draw = random.Random(seed)
    names = sorted(OPERATIONS)
    in_flight: list[dist.Work] = []
    for _ in range(count):
        group, name = draw.choice(groups), draw.choice(names)
        x = torch.ones(draw.choice(SIZES))
        work = OPERATIONS[name](group, x, draw.random() < 0.5)
        if work is not None:
            in_flight.append(work)
        if len(in_flight) == 8:
            draw.shuffle(in_flight)
            for each in in_flight:
                each.wait()
            in_flight.clear()
    for each in in_flight:
        each.wait()


def ten_thousand(rank: int, world_size: int, path: str, transport: str) -> tuple[int, int, int]:
    """What descriptors, threads and resident bytes grow by, after a thousand to warm up."""
    join(rank, world_size, path, transport)
    groups = [world(), *(dist.new_group() for _ in range(2))]
    random_collectives(groups, 1_000, 0)
    before = descriptors(), threading.active_count(), resident_nbytes()
    random_collectives(groups, 10_000, 1)
    after = descriptors(), threading.active_count(), resident_nbytes()
    dist.destroy_process_group()
    return after[0] - before[0], after[1] - before[1], after[2] - before[2]


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_ten_thousand_collectives_leave_nothing_behind(transport: str, tmp_path: Path) -> None:
    path = str(tmp_path / "store")
    for opened, started, grown_nbytes in on_processes(2, ten_thousand, path, transport):
        assert opened <= 0
        assert started <= 3  # at most: a second worker a group, for futures with callbacks
        assert grown_nbytes < 2 << 20  # 210 bytes a collective: less than one tensor takes


def is_killed_in(rank: int, world_size: int, path: str, transport: str, name: str) -> list[str]:
    """Rank 1 dies in one of many calls; the others tell what they were told, then go on without."""
    join(rank, world_size, path, transport)
    x = torch.ones(50_000)
    OPERATIONS[name](world(), x, False)
    if rank == 1:
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGKILL)).start()
    messages = []
    for _ in range(2):  # the second call is told at once
        try:
            while True:
                OPERATIONS[name](world(), x, False)
        except errors.PeerLost as error:
            messages.append(str(error))
    dist.destroy_process_group()
    join(min(rank, 1), world_size - 1, f"{path}-again", transport)
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == world_size - 1
    dist.destroy_process_group()
    until_s = time.monotonic() + 10
    while threading.active_count() > 1 and time.monotonic() < until_s:
        time.sleep(0.01)
    assert threading.active_count() == 1
    return messages


@pytest.mark.parametrize("name", sorted(OPERATIONS))
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_killed_rank_is_named_by_all_others(transport: str, name: str, tmp_path: Path) -> None:
    path = str(tmp_path / "store")
    results = on_processes(3, is_killed_in, path, transport, name, may_die=(1,))
    for rank in (0, 2):
        assert len(results[rank]) == 2
        assert all("lost rank 1 of 3" in message for message in results[rank])

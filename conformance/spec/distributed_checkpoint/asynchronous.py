"""async_save: what is saved is what there was at the call, and errors come from the future."""

from __future__ import annotations

import warnings
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from conformance import Chapter, Me, Ranks, world_sizes
from conformance.spec.distributed_checkpoint.facts import (
    Fact,
    load,
    numbers,
    raised,
    unsaid,
)
from conformance.spec.facts import check_fact, rows, unlike

# To save a tensor of a device, torch pins memory.
NEEDS = (
    *("op:broadcast", "op:all_gather", "op:gather", "op:scatter", "dtype:uint8", "dtype:int64"),
    "device:pinned_memory",
)

chapter = Chapter(
    "distributed_checkpoint",
    source="torch 2.13 docs, torch.distributed.checkpoint.async_save",
    needs=NEEDS,
)

NUMEL = 1 << 16
REFUSAL = "A CPU backend must be enabled"


def save_later(state: dict[str, Any], folder: object, **how: Any) -> Any:
    """The future; None where the group has no backend for the host, which is refused."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return dcp.async_save(state, checkpoint_id=str(folder), **how)
        except AssertionError as error:
            if REFUSAL not in str(error):
                raise
            return None


def values(me: Me, value: float) -> dict[str, Any]:
    x = torch.full((NUMEL,), value, device=me.device)
    nested = {"list": [value, x[:2]]}
    return {f"w{me.rank}": x, "nested": nested, "o": value, "last": deque([value])}


def zeros(me: Me) -> dict[str, Any]:
    nested = {"list": [0.0, torch.zeros(2)]}
    return {f"w{me.rank}": torch.zeros(NUMEL), "nested": nested, "o": 0.0, "last": deque()}


def loaded(me: Me, folder: str, value: float) -> list[str]:
    want = {
        f"w{me.rank}": torch.full((NUMEL,), value),
        "nested": {"list": [value, torch.full((2,), value)]},
        "o": value,
        "last": deque([value]),
    }
    return unlike(f"loaded from {Path(folder).name}", load(zeros(me), folder), want)


def as_of_the_call(me: Me, folder: str) -> list[str]:
    """Tensors, containers and objects are changed as soon as the call has returned."""
    state = values(me, 1.0)
    future = save_later(state, folder)
    if future is None:
        return []
    state[f"w{me.rank}"].fill_(7.0)
    state["nested"]["list"][0] = 7.0
    state["o"] = 7.0
    state["last"].append(7.0)
    future.result()
    return loaded(me, folder, 1.0)


def several(me: Me, folder: str) -> list[str]:
    found = []
    for number in (1.0, 2.0):
        future = save_later(values(me, number), f"{folder}/{number:g}")
        if future is None:
            return []
        future.result()
    for number in (1.0, 2.0):
        found += loaded(me, f"{folder}/{number:g}", number)
    return found


def with_a_group_of_its_own(me: Me, folder: str) -> list[str]:
    """The group of the training is in use meanwhile."""
    future = save_later(values(me, 3.0), folder, process_group=dist.new_group())
    if future is None:
        return []
    sums = []
    for number in range(20):
        x = torch.full((4,), float(number + me.rank), device=me.device)
        dist.all_reduce(x)
        sums.append(x[0].item())
    future.result()
    want = [float(sum(n + rank for rank in range(me.world_size))) for n in range(20)]
    return unlike("sums", sums, want) + loaded(me, folder, 3.0)


def a_rank_fails(me: Me, folder: str) -> list[str]:
    """Rank 1 cannot write where it should."""

    class Fails(dcp.DefaultSavePlanner):
        def resolve_data(self, item: Any) -> Any:
            raise OSError("the disk of rank 1 is full")

    planner = Fails() if me.rank == 1 else dcp.DefaultSavePlanner()
    future = save_later({f"w{me.rank}": numbers((3,))}, folder, planner=planner)
    if future is None:
        return []
    return unsaid("result", raised(future.result), "the disk of rank 1 is full", "(RANK 1)")


@world_sizes(2)
@pytest.mark.parametrize(
    "fact",
    rows(
        (
            chapter.must(
                "dcp/async-as-of-the-call",
                "async_save saves what there is at the call, whatever becomes of tensors, "
                "containers and other objects afterwards; without a backend for the host it is "
                "refused.",
                rests_on=("dcp/own-keys", "dcp/nested"),
            ),
            as_of_the_call,
        ),
        (
            chapter.must(
                "dcp/async-one-after-another",
                "Each of several checkpoints has its own values.",
                rests_on="dcp/async-as-of-the-call",
            ),
            several,
        ),
        (
            chapter.must(
                "dcp/async-beside-training",
                "With a process_group of its own, it goes on while other groups work.",
                needs=(*NEEDS, "op:all_reduce"),
                rests_on=("dcp/async-as-of-the-call", "dcp/subgroup"),
            ),
            with_a_group_of_its_own,
        ),
        (
            chapter.must(
                "dcp/async-error",
                "If saving fails on a rank, the future of every rank raises CheckpointException "
                "with its number and its error.",
                rests_on=("dcp/async-as-of-the-call", "dcp/a-rank-fails"),
            ),
            a_rank_fails,
        ),
    ),
)
def test_async_save(ranks: Ranks, tmp_path: Path, fact: Fact) -> None:
    check_fact(ranks, fact, str(tmp_path / "checkpoint"))

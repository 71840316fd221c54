"""FSDP in checkpoint files: torch.distributed.checkpoint saves and loads, also for other ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from conformance import Chapter, Me, Ranks, world_sizes
from conformance.spec.fsdp.models import Net
from conformance.spec.fsdp.state_dict_kinds import SHARDED, SHARDS, adam
from conformance.spec.fsdp.training_runs import both_kinds, check_tensors, full_parameters

chapter = Chapter("fsdp")


def save_and_go_on(me: Me, path: str, orig: bool, members: int) -> dict[str, Tensor]:
    """The first ranks, with the same batches, train, save, and train one more step."""
    if me.rank >= members:
        return {}
    with a_world(me, members, "save"):
        model, optimizer = train_alike(me, 0, orig)
        dcp.save(sharded_states(model, optimizer), checkpoint_id=path)
        step_alike(me, model, optimizer, 7)
        return full_parameters(model)


def load_and_go_on(me: Me, path: str, orig: bool, members: int) -> dict[str, Tensor]:
    """Another number of ranks, with other values, load it and train the same step."""
    if me.rank >= members:
        return {}
    with a_world(me, members, "load"):
        model, optimizer = train_alike(me, 9, orig)
        state = sharded_states(model, optimizer)
        dcp.load(state, checkpoint_id=path)
        cls = type(model)
        with cls.state_dict_type(model, SHARDED, None, SHARDS):
            model.load_state_dict(state["model"])
            cls.optim_state_dict_to_load(model, optimizer, state["optim"], load_directly=True)
        step_alike(me, model, optimizer, 7)
        return full_parameters(model)


@contextlib.contextmanager
def a_world(me: Me, members: int, name: str) -> Iterator[None]:
    """A default group of the first ranks."""
    dist.init_process_group(
        me.target.backend,
        store=dist.PrefixStore(f"{name} {members}", me.store),
        rank=me.rank,
        world_size=members,
        pg_options=me.options,
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def train_alike(me: Me, seed: int, orig: bool) -> tuple[Any, torch.optim.Optimizer]:
    model = adam(orig=orig).wrapped(me, seed=seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for number in range(2):
        step_alike(me, model, optimizer, number)
    return model, optimizer


def step_alike(me: Me, model: Any, optimizer: torch.optim.Optimizer, number: int) -> None:
    Net().loss(model, 0, number, me.device).backward()
    optimizer.step()
    optimizer.zero_grad()


def sharded_states(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    cls = type(model)
    with cls.state_dict_type(model, SHARDED, None, SHARDS):
        return {"model": model.state_dict(), "optim": cls.optim_state_dict(model, optimizer)}


def check_files(
    ranks: Ranks, path: Path, savers: int, loaders: int, orig: tuple[bool, bool]
) -> None:
    want = ranks.run(save_and_go_on, str(path), orig[0], savers)[0]
    got = ranks.run(load_and_go_on, str(path), orig[1], loaders)[:loaders]
    check_tensors(got, [want] * loaders, within=1e-6)


@chapter.must(
    "fsdp/checkpoint",
    "torch.distributed.checkpoint saves and loads sharded state dicts of model and optimizer.",
    source="torch 2.13 docs, torch.distributed.checkpoint",
    rests_on="fsdp/sharded-state-dict-loads",
)
@world_sizes(2)
@both_kinds
def test_checkpoints(bare_ranks: Ranks, tmp_path: Path, orig: bool) -> None:
    check_files(bare_ranks, tmp_path, 2, 2, (orig, orig))


@chapter.must(
    "fsdp/reshards",
    "A checkpoint of sharded state dicts can be loaded by a different number of ranks, with or "
    "without original parameters; training continues as it would have.",
    source="torch 2.13 docs, torch.distributed.checkpoint: load-time resharding",
    rests_on="fsdp/checkpoint",
)
@world_sizes(3)
@both_kinds
def test_another_number_of_ranks(bare_ranks: Ranks, tmp_path: Path, orig: bool) -> None:
    check_files(bare_ranks, tmp_path / "two", 2, 3, (orig, not orig))
    check_files(bare_ranks, tmp_path / "three", 3, 2, (orig, not orig))

"""Resuming DDP training from files: bit for bit, across DDP implementations, with more ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from conformance import Chapter, Me, Ranks, assert_each_rank, assert_same_on_all_ranks, world_sizes
from conformance.oracle.near import Near
from conformance.spec.checkpointing.networks import NON_REENTRANT
from conformance.spec.checkpointing.saved_model import (
    Model,
    copied,
    optimizer_of,
    random_state,
    set_random_state,
    step,
)
from conformance.spec.checkpointing.training import batch, loss_of
from conformance.spec.tolerance import assert_near

chapter = Chapter(
    "checkpointing",
    source="torch tutorial 'Getting Started with DDP', save and load checkpoints",
    needs="device:autocast",
)


STEPS = 4
State = dict[str, Any]


def train_from_a_file(
    me: Me,
    folder: str,
    first: int,
    last: int,
    kind: str = "sgd",
    options: State | None = None,
    wrapper: str = "target",
    seed: int = 0,
) -> State:
    """Steps first to last, from the file of step `first` on; the last state is saved and returned.

    folder: every rank writes and reads a file of its own there, so that hosts need share nothing.
    """
    ddp: Any = TorchDDP if wrapper == "torch" else me.ddp
    module = Model(NON_REENTRANT, seed).to(me.device)
    model = ddp(module, **(options or {}))
    optimizer = optimizer_of(kind, model)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    torch.manual_seed(100 + me.rank)
    if first:
        saved = torch.load(_file(folder, me.rank, first), map_location=me.device)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        schedule.load_state_dict(saved["schedule"])
        set_random_state(saved["random"].cpu(), me.device)
    for i in range(first, last):
        step(me, model, optimizer, i)
        schedule.step()
    state = {
        "model": dict(model.state_dict()),
        "optimizer": optimizer.state_dict(),
        "schedule": schedule.state_dict(),
        "random": random_state(me.device),
    }
    os.makedirs(folder, exist_ok=True)
    torch.save(state, _file(folder, me.rank, last))
    return {key: copied(state[key]) for key in ("model", "optimizer")}


def _file(folder: str, rank: int, after: int) -> str:
    return os.path.join(folder, f"rank{rank}-step{after}.pt")


@chapter.must(
    "saving/resume",
    "Training that resumes in new groups from files of model, optimizer, schedule and random "
    "numbers ends with the same bits as training that did not stop.",
    rests_on=("saving/keys", "saving/optimizer"),
)
@world_sizes(1, 2)
@pytest.mark.parametrize("kind", ["sgd", "adam"])
@pytest.mark.parametrize(
    "options",
    [{}, {"gradient_as_bucket_view": True}, {"static_graph": True}],
    ids=lambda o: ", ".join(o) or "usual",
)
def test_going_on_from_a_file_is_not_stopping(
    ranks: Ranks, tmp_path: Path, kind: str, options: State
) -> None:
    want = ranks.run(train_from_a_file, str(tmp_path / "whole"), 0, STEPS, kind, options)
    halves = str(tmp_path / "halves")
    ranks.run(train_from_a_file, halves, 0, STEPS // 2, kind, options)
    ranks.renew()
    # Another seed, so that what is not loaded shows.
    got = ranks.run(train_from_a_file, halves, STEPS // 2, STEPS, kind, options, "target", 1)
    assert_each_rank(got, want, what="state")


@chapter.must(
    "saving/resume-across-wrappers",
    "Training that torch's wrapper began continues in the target's wrapper, and the other way "
    "round, without a difference beyond rounding.",
    rests_on="saving/resume",
)
@world_sizes(2)
@pytest.mark.parametrize("wrappers", [("torch", "target"), ("target", "torch")], ids="-".join)
def test_going_on_with_another_wrapper(
    ranks: Ranks, tmp_path: Path, wrappers: tuple[str, str]
) -> None:
    """Two wrappers may round differently, so near is enough."""
    before, after = wrappers
    folder = str(tmp_path / "whole")
    want = ranks.run(train_from_a_file, folder, 0, STEPS, "sgd", {}, before)
    folder = str(tmp_path / "halves")
    ranks.run(train_from_a_file, folder, 0, STEPS // 2, "sgd", {}, before)
    got = ranks.run(train_from_a_file, folder, STEPS // 2, STEPS, "sgd", {}, after, 1)
    for name, value in want[0]["model"].items():
        if value.is_floating_point() and "running" not in name:
            near = Near.relative(value, 1e-5)
            assert_near([mine["model"][name] for mine in got], [near] * 2, name)


def train_in_a_smaller_group_first(me: Me, folder: str) -> State:
    """The state at the end: two ranks take the first steps, and all ranks the others."""
    pair = dist.new_group([0, 1])
    path = os.path.join(folder, f"rank{me.rank}.pt")
    saved: State = {}
    if me.rank < 2:
        model = me.ddp(_dry_model(0).to(me.device), process_group=pair)
        optimizer = optimizer_of("sgd", model)
        for i in range(2):
            step(me, model, optimizer, i)
        os.makedirs(folder, exist_ok=True)
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
        saved = torch.load(path, map_location=me.device)
    # A rank that joins has the model from the wrapper, and the optimizer's state from rank 0.
    shared: list[Any] = [saved.get("optimizer")]
    dist.broadcast_object_list(shared, 0, device=me.device)
    model = me.ddp(_dry_model(1 + me.rank).to(me.device))
    if me.rank < 2:
        model.load_state_dict(saved["model"])
    model = me.ddp(model.module)
    optimizer = optimizer_of("sgd", model)
    optimizer.load_state_dict(shared[0])
    for i in range(2, 4):
        step(me, model, optimizer, i)
    return copied(dict(model.module.state_dict()))  # type: ignore[no-any-return]  # as it was


def _dry_model(seed: int) -> Model:
    """Without dropout and statistics, which differ between ranks."""
    model = Model("", seed)
    model.drop = torch.nn.Dropout(0)
    model.norm = torch.nn.BatchNorm1d(4, track_running_stats=False)
    return model


def train_alone(world_size: int) -> State:
    """The same in one process, with the batches of all ranks that took part."""
    model = _dry_model(0)
    optimizer = optimizer_of("sgd", model)
    for i in range(4):
        members = 2 if i < 2 else world_size
        optimizer.zero_grad()
        for rank in range(members):
            (loss_of(model(batch(rank, i, size=4).float())) / members).backward()
        optimizer.step()
    return dict(model.state_dict())


@chapter.should(
    "saving/another-number-of-ranks",
    "A state that a smaller group saved can be loaded by a larger one, which continues from "
    "there as one process with all batches would.",
    source="torch, elastic training: a job restarts with another number of workers",
    rests_on=("saving/keys", "saving/optimizer"),
)
@world_sizes(3)
def test_going_on_with_more_ranks(ranks: Ranks, tmp_path: Path) -> None:
    got = ranks.run(train_in_a_smaller_group_first, str(tmp_path / "saved"))
    assert_same_on_all_ranks(got)
    for name, value in train_alone(3).items():
        assert_near([mine[name] for mine in got], [Near.relative(value, 1e-5)] * 3, name)

"""FSDP state dicts: buffers, extra state, hooks, saving between passes, optimizer entries."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullOptimStateDictConfig, MixedPrecision
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from conformance import (
    Chapter,
    Me,
    Ranks,
    assert_same_on_all_ranks,
    assert_that,
    covers,
    world_sizes,
)
from conformance.spec.fsdp.custom import inputs, linear
from conformance.spec.fsdp.models import Net
from conformance.spec.fsdp.state_dict_kinds import FULL, ON_DEVICE, SHARDED
from conformance.spec.fsdp.training_runs import (
    STRATEGIES,
    Recipe,
    Run,
    both_kinds,
    check_runs,
    full_parameters,
    train_whole,
    wrap,
)

chapter = Chapter("fsdp")


full_or_sharded = pytest.mark.parametrize("kind", [FULL, SHARDED], ids=["full", "sharded"])


class Holding(nn.Module):
    """A layer with buffers of several dtypes, one of which is not persistent, and with a tag that
    is its extra state."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.layer = linear(3, 3, seed).float()
        self.register_buffer("single", torch.arange(3.0) + 1 / 3 + seed)
        self.register_buffer("count", torch.arange(4) + seed)
        self.register_buffer("wide", torch.arange(2.0, dtype=torch.float64) + 1e-12 + seed)
        self.register_buffer("narrow", torch.ones(2, dtype=torch.float16) * seed)
        self.register_buffer("scratch", torch.ones(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out


class Tagged(Holding):
    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.tag = {"seed": seed, "words": ["a", "b"]}

    def get_extra_state(self) -> Any:
        return self.tag

    def set_extra_state(self, state: Any) -> None:
        self.tag = state


def pair(cls: type[Holding], seed: int = 1) -> nn.Sequential:
    return nn.Sequential(cls(seed), cls(seed + 1))


def wrapped_pair(me: Me, cls: type[Holding], orig: bool, seed: int = 1, **kwargs: Any) -> Any:
    policy = ModuleWrapPolicy({cls})
    return wrap(me, pair(cls, seed), auto_wrap_policy=policy, use_orig_params=orig, **kwargs)


def saved_buffers(me: Me, kind: Any, orig: bool) -> dict[str, Tensor]:
    """Buffers in a state dict after a forward."""
    low = MixedPrecision(buffer_dtype=torch.bfloat16)
    model = wrapped_pair(me, Holding, orig, mixed_precision=low)
    with torch.no_grad():
        model(inputs(0, 0).float().to(me.device))
    with type(model).state_dict_type(model, kind):
        state = model.state_dict()
    return {name: value for name, value in state.items() if ".layer." not in name}


@chapter.must(
    "fsdp/buffers-of-several-dtypes",
    "With a buffer_dtype, each buffer is saved in the dtype that it had before, whatever the "
    "dtypes of other buffers.",
    source="pytorch#93391",
    rests_on="fsdp/buffers-in-full-precision",
)
@world_sizes(2)
@both_kinds
@full_or_sharded
def test_buffers_of_several_dtypes(ranks: Ranks, kind: Any, orig: bool) -> None:
    state = pair(Holding).state_dict()
    want = {name: str(value.dtype) for name, value in state.items() if ".layer." not in name}
    for rank, got in enumerate(ranks.run(saved_buffers, kind, orig)):
        dtypes = {name: str(value.dtype) for name, value in got.items()}
        assert_that(dtypes == want, f"dtypes {dtypes}, want {want}", rank)


def save_and_load(
    me: Me, cls: type[Holding], kind: Any, orig: bool
) -> tuple[list[str], list[str], list[Any]]:
    """Keys of a state dict; what is missing when another model loads it, and that one's tags."""
    model, other = (wrapped_pair(me, cls, orig, seed) for seed in (1, 5))
    with type(model).state_dict_type(model, kind):
        state = model.state_dict()
    keys = list(state)
    with type(other).state_dict_type(other, kind):
        missing = other.load_state_dict(state, strict=False).missing_keys
    return keys, missing, [part.tag for part in other.modules() if isinstance(part, Tagged)]


@chapter.must(
    "fsdp/buffers-that-are-not-persistent",
    "Non-persistent buffers are in no kind of state dict, and loading does not report them as "
    "missing.",
    source="torch 2.13 docs, register_buffer",
    rests_on=("fsdp/full-state-dict", "fsdp/sharded-state-dict"),
)
@world_sizes(2)
@both_kinds
@full_or_sharded
def test_buffers_that_are_not_persistent(ranks: Ranks, kind: Any, orig: bool) -> None:
    want = (list(pair(Holding).state_dict()), list[str](), list[Any]())
    got = ranks.run(save_and_load, Holding, kind, orig)
    assert_same_on_all_ranks(got, want, what="keys, and missing ones")


@chapter.must(
    "fsdp/extra-state",
    "A module's extra state is in every kind of state dict, and is passed to its set_extra_state "
    "when that is loaded.",
    source="torch 2.13 docs, get_extra_state",
    rests_on=("fsdp/full-state-dict", "fsdp/sharded-state-dict"),
)
@world_sizes(2)
@both_kinds
@full_or_sharded
def test_extra_state(ranks: Ranks, kind: Any, orig: bool) -> None:
    bare = pair(Tagged)
    tags = [part.tag for part in bare.modules() if isinstance(part, Tagged)]
    want = (list(bare.state_dict()), list[str](), tags)
    got = ranks.run(save_and_load, Tagged, kind, orig)
    assert_same_on_all_ranks(got, want, what="keys, missing ones and extra state")


class Hooked(Holding):
    """Adds an entry to its state dict, and takes it out of what is loaded."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.tag: Any = None
        own: Any = self
        own.register_state_dict_post_hook(self._add)
        own.register_load_state_dict_pre_hook(self._take)

    @staticmethod
    def _add(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        state[prefix + "version"] = torch.ones(1)

    @staticmethod
    def _take(module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
        module.tag = state.pop(prefix + "version", None)


def pass_hooks(me: Me, kind: Any, orig: bool) -> tuple[list[str], int, list[str]]:
    """Keys of a state dict; how many hooks before loading found their entry, and what is left
    over."""
    model = wrapped_pair(me, Hooked, orig)
    with type(model).state_dict_type(model, kind):
        state = model.state_dict()
        keys = list(state)
        unexpected = model.load_state_dict(state, strict=False).unexpected_keys
    parts = [part for part in model.modules() if isinstance(part, Hooked)]
    return keys, sum(part.tag is not None for part in parts), unexpected


@chapter.must(
    "fsdp/state-dict-hooks-of-modules",
    "Entries that state dict hooks of wrapped modules add are in the state dict, and the "
    "modules' hooks before loading see them under their own names.",
    source="torch 2.13 docs, register_state_dict_post_hook, register_load_state_dict_pre_hook",
    rests_on="fsdp/full-state-dict",
)
@world_sizes(2)
@both_kinds
@full_or_sharded
def test_hooks_of_modules(ranks: Ranks, kind: Any, orig: bool) -> None:
    want = (list(pair(Hooked).state_dict()), 2, list[str]())
    got = ranks.run(pass_hooks, kind, orig)
    assert_same_on_all_ranks(got, want, what="keys, entries found and left over")


# When they are taken


def train_and_save(me: Me, recipe: Recipe, kind: Any) -> Run:
    """Two backward passes before each step, the first one perhaps under no_sync; a state dict is
    taken after the first, after each forward, and before the step."""
    model = recipe.wrapped(me)
    optimizer = recipe.optimizer_of(model)
    losses = []

    def save() -> None:
        with type(model).state_dict_type(model, kind):
            model.state_dict()

    for step in range(recipe.steps):
        for micro, (number,) in enumerate(recipe.numbers(step)):
            waits = recipe.no_sync and micro == 0
            with model.no_sync() if waits else contextlib.nullcontext():
                loss = recipe.net.loss(model, me.rank, number, me.device)
                save()
                loss.backward()
            save()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return Run(losses, full_parameters(model))


@chapter.must(
    "fsdp/saved-while-accumulating",
    "Taking a state dict between backward passes, under no_sync or not, or between a forward and "
    "its backward, does not affect training.",
    source="torch 2.13 docs, FullyShardedDataParallel, state_dict_type",
    rests_on=("fsdp/no-sync", "fsdp/full-state-dict"),
)
@world_sizes(2)
@both_kinds
@full_or_sharded
@pytest.mark.parametrize("no_sync", [False, True], ids=["sync", "no_sync"])
def test_state_dicts_between_passes(ranks: Ranks, kind: Any, orig: bool, no_sync: bool) -> None:
    for strategy in STRATEGIES:
        recipe = Recipe(strategy=strategy, orig=orig, steps=2, micro_batches=2, no_sync=no_sync)
        check_runs(ranks.run(train_and_save, recipe, kind), train_whole(recipe, ranks.world_size))


# Optimizers


def own_state(me: Me, kind: Any) -> tuple[Any, Any]:
    """What an optimizer keeps under a name of its own, as it is saved and as it is loaded."""
    model = Recipe(orig=True).wrapped(me)
    optimizer = torch.optim.Adam(model.parameters())
    Net().loss(model, me.rank, 0, me.device).backward()
    optimizer.step()
    named: Any = optimizer.state
    named["statistics"] = {"steps": 5, "scale": 0.5}
    cls = type(model)
    with cls.state_dict_type(model, kind):
        state = cls.optim_state_dict(model, optimizer)
        there = state["state"].get("statistics")
        back = cls.optim_state_dict_to_load(model, optimizer, copy.deepcopy(state))
    return there, back["state"].get("statistics")


@chapter.must(
    "fsdp/optimizer-state-of-no-parameter",
    "State that an optimizer keeps under a name of its own, and that belongs to no parameter, is "
    "in its state dict and is loaded from it.",
    source="pytorch#92744",
    rests_on="fsdp/full-optimizer-state",
)
@world_sizes(2)
@full_or_sharded
def test_state_of_no_parameter(ranks: Ranks, kind: Any) -> None:
    kept = {"steps": 5, "scale": 0.5}
    got = ranks.run(own_state, kind)
    assert_same_on_all_ranks(got, (kept, kept), what="saved and loaded state")


def state_in_a_group(me: Me, orig: bool, config: Any) -> tuple[int, int]:
    """Entries of the optimizer's full state dict, and of what it loads, on all ranks but rank 0."""
    group = dist.new_group(list(range(1, me.world_size)))
    if me.rank == 0:
        return 0, 0
    model = Recipe(orig=orig).wrapped(me, process_group=group)
    optimizer = torch.optim.Adam(model.parameters())
    Net().loss(model, me.rank, 0, me.device).backward()
    optimizer.step()
    cls = type(model)
    with cls.state_dict_type(model, FULL, None, config):
        state = cls.optim_state_dict(model, optimizer, group=group)
        back = cls.optim_state_dict_to_load(model, optimizer, copy.deepcopy(state), group=group)
    return len(state.get("state", {})), len(back["state"])


@chapter.must(
    "fsdp/optimizer-state-in-a-group",
    "optim_state_dict and optim_state_dict_to_load with a group involve only its ranks, "
    "whichever these are.",
    source="pytorch#155680",
    rests_on="fsdp/optimizer-state-loads",
)
@world_sizes(3)
@both_kinds
def test_state_in_a_group_without_rank_0(ranks: Ranks, orig: bool) -> None:
    entries = len(list(Net().make().parameters()))
    for rank, (there, back) in enumerate(ranks.run(state_in_a_group, orig, ON_DEVICE)):
        if rank:
            assert_that(there == entries, f"{there} of {entries} entries are saved", rank)
            assert_that(back > 0, "nothing is loaded", rank)


@covers("fsdp/optimizer-state-in-a-group")
@world_sizes(3)
def test_the_first_rank_of_a_group_has_the_state(ranks: Ranks) -> None:
    entries = len(list(Net().make().parameters()))
    config = FullOptimStateDictConfig(rank0_only=True, offload_to_cpu=False)
    got = ranks.run(state_in_a_group, False, config)
    saved = [there for there, _ in got]
    assert_that(saved == [0, entries, 0], f"{saved} of {entries} entries are saved")
    assert_that(got[2][1] > 0, "nothing is loaded", 2)

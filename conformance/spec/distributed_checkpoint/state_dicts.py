"""get_state_dict and its family: states of model and optimizer by name, without any wrapper's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import state_dict as family
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.nn.parallel import DistributedDataParallel

from conformance import Chapter, Me, Ranks, world_sizes
from conformance.oracle.data import seeded_generator
from conformance.spec.distributed_checkpoint.facts import (
    Fact,
    load,
    raised,
    save,
)
from conformance.spec.facts import check_fact, rows, unlike

# To save a tensor of a device, torch pins memory.
NEEDS = (
    *("op:broadcast", "op:all_gather", "op:gather", "op:scatter", "dtype:uint8", "dtype:int64"),
    "device:pinned_memory",
)

chapter = Chapter(
    "distributed_checkpoint",
    source="torch 2.13 docs, torch.distributed.checkpoint.state_dict",
    needs=NEEDS,
)

NAMES = ["0.weight", "0.bias", "2.weight", "2.bias"]


def network(me: Me, seed: int) -> Any:
    with seeded_generator(seed):
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(me.device)


def wrapped_by_ddp(me: Me, module: Any) -> Any:
    """In the target's DDP, or in torch's where it has none."""
    return me.ddp(module) if me.target.ddp else DistributedDataParallel(module)


def in_ddp(me: Me, seed: int = 0) -> Any:
    return wrapped_by_ddp(me, network(me, seed))


def adam(model: Any) -> Any:
    """Two groups with rates of their own. Their steps change weights without gradients, too."""
    params = list(model.parameters())
    groups = [{"params": params[:1], "lr": 0.1}, {"params": params[1:], "lr": 0.02}]
    return torch.optim.AdamW(groups, betas=(0.5, 0.75), weight_decay=0.25)


def train(me: Me, model: Any, optimizer: Any, steps: range) -> None:
    """Steps of the bare module: all ranks have the same batches, so nothing is to be reduced."""
    for step in steps:
        with seeded_generator(100 + step):
            x = torch.randn(2, 3).to(me.device)
        optimizer.zero_grad()
        getattr(model, "module", model)(x).square().sum().backward()
        optimizer.step()


def weights(model: Any) -> list[Any]:
    return [param.detach().clone().cpu() for param in model.parameters()]


def names(me: Me, folder: str) -> list[str]:
    model = in_ddp(me)
    got: dict[str, Any] = family.get_model_state_dict(model)
    found = unlike("names", list(got), NAMES)
    return found or unlike("values", [got[n].cpu() for n in NAMES], weights(model))


def names_of_states(me: Me, folder: str) -> list[str]:
    model = in_ddp(me)
    optimizer = adam(model)
    train(me, model, optimizer, range(2))
    got = family.get_optimizer_state_dict(model, optimizer)
    groups: Any = got["param_groups"]
    found = unlike("names", list(got["state"]), NAMES)
    found += unlike("groups", [g["params"] for g in groups], [NAMES[:1], NAMES[1:]])
    found += unlike("rates", [g["lr"] for g in groups], [0.1, 0.02])
    own = [optimizer.state[param]["exp_avg"].cpu() for param in model.parameters()]
    states: Any = got["state"]
    return found + unlike("averages", [states[n]["exp_avg"].cpu() for n in NAMES], own)


def only_on_rank_zero(me: Me, folder: str) -> list[str]:
    model = in_ddp(me)
    optimizer = adam(model)
    train(me, model, optimizer, range(1))
    how = StateDictOptions(full_state_dict=True, cpu_offload=True)
    seen = [list(state) for state in family.get_state_dict(model, optimizer, options=how)]
    want = [NAMES, ["state", "param_groups"]] if me.rank == 0 else [[], []]
    return unlike("keys", seen, want)


def without_frozen(me: Me, folder: str) -> list[str]:
    module = network(me, 0)
    module[0].weight.requires_grad_(False)
    model = wrapped_by_ddp(me, module)
    got = family.get_model_state_dict(model, options=StateDictOptions(ignore_frozen_params=True))
    return unlike("names", list(got), NAMES[1:])


def flat(me: Me, folder: str) -> list[str]:
    """One key for each state and option of each parameter; loaded again, all is as it was."""
    model = in_ddp(me)
    optimizer = adam(model)
    train(me, model, optimizer, range(2))
    how = StateDictOptions(flatten_optimizer_state_dict=True)
    got = family.get_optimizer_state_dict(model, optimizer, options=how)
    found = [] if "state.0.weight.exp_avg" in got else [f"the keys are {list(got)}"]
    found += unlike("rate", got.get("param_groups.2.bias.lr"), 0.02)
    other = in_ddp(me)
    fresh = adam(other)
    family.set_optimizer_state_dict(other, fresh, got, options=how)
    return found + unlike("states", states_of(fresh), states_of(optimizer))


def groups_in_another_order(me: Me, folder: str) -> list[str]:
    """The state of an optimizer that has the groups the other way round."""
    model, other = in_ddp(me), in_ddp(me)
    optimizer, turned = adam(model), adam(other)
    turned.param_groups.reverse()
    train(me, model, optimizer, range(1))
    family.set_optimizer_state_dict(
        other, turned, family.get_optimizer_state_dict(model, optimizer)
    )
    found = unlike("rates", [g["lr"] for g in turned.param_groups], [0.02, 0.1])
    turned.param_groups.reverse()
    return found + unlike("states", states_of(turned), states_of(optimizer))


def states_of(optimizer: Any) -> list[Any]:
    every = [param for group in optimizer.param_groups for param in group["params"]]
    return [{k: v.cpu() for k, v in sorted(optimizer.state[param].items())} for param in every]


def asked_for(me: Me, folder: str) -> list[str]:
    """The state of an optimizer that has none."""
    model = in_ddp(me)
    optimizer, before = adam(model), weights(model)
    family.get_optimizer_state_dict(model, optimizer)
    found = unlike("parameters", weights(model), before)
    found += unlike("gradients", [p.grad for p in model.parameters()], [None] * len(NAMES))
    return found + unlike("rates", [g["lr"] for g in optimizer.param_groups], [0.1, 0.02])


def before_the_first_step(me: Me, folder: str) -> list[str]:
    """Asking for the state of an optimizer that has none has no effect on what comes later."""
    asked, other = in_ddp(me), in_ddp(me)
    first, second = adam(asked), adam(other)
    family.get_optimizer_state_dict(asked, first)
    for model, optimizer in ((asked, first), (other, second)):
        train(me, model, optimizer, range(3))
    return unlike("parameters after training", weights(asked), weights(other))


def resumed(me: Me, folder: str) -> list[str]:
    """Training goes on in another model as it would have in the one that was saved."""
    model = in_ddp(me)
    optimizer = adam(model)
    train(me, model, optimizer, range(2))
    state = dict(zip(("model", "optimizer"), family.get_state_dict(model, optimizer), strict=True))
    save(state, folder)
    train(me, model, optimizer, range(2, 4))
    # A third model has the tensors that are loaded into: the other gets what it is given.
    third = in_ddp(me, seed=8)
    states = family.get_state_dict(third, adam(third))
    into: dict[str, Any] = dict(zip(("model", "optimizer"), states, strict=True))
    load(into, folder)
    other = in_ddp(me, seed=9)
    fresh = adam(other)
    family.set_state_dict(
        other, fresh, model_state_dict=into["model"], optim_state_dict=into["optimizer"]
    )
    train(me, other, fresh, range(2, 4))
    return unlike("parameters", weights(other), weights(model))


def without_the_wrapper(me: Me, folder: str) -> list[str]:
    """What was saved of a wrapped model is loaded into one that is not wrapped, and back."""
    model = in_ddp(me)
    save({"model": family.get_model_state_dict(model)}, folder)
    bare, third = network(me, 5), network(me, 6)
    into = {"model": family.get_model_state_dict(third)}
    load(into, folder)
    family.set_model_state_dict(bare, into["model"])
    found = unlike("bare", weights(bare), weights(model))
    other = in_ddp(me, seed=7)
    family.set_model_state_dict(other, family.get_model_state_dict(bare))
    return found + unlike("wrapped", weights(other), weights(model))


def strict(me: Me, folder: str) -> list[str]:
    model = in_ddp(me)
    state = family.get_model_state_dict(model)
    del state["2.bias"]
    said = raised(lambda: family.set_model_state_dict(model, state))
    found = [] if "RuntimeError" in said and "2.bias" in said else [f"strict: {said}"]
    loose: Any = family.set_model_state_dict(model, state, options=StateDictOptions(strict=False))
    missing = [name.removeprefix("module.") for name in loose.missing_keys]
    return found + unlike("missing", missing, ["2.bias"])


def another_optimizer(me: Me, folder: str) -> list[str]:
    """A state that lacks a parameter is refused by name."""
    model = in_ddp(me)
    optimizer = adam(model)
    train(me, model, optimizer, range(1))
    state: Any = family.get_optimizer_state_dict(model, optimizer)
    state["state"] = {name: x for name, x in state["state"].items() if name != "2.weight"}
    said = raised(lambda: family.set_optimizer_state_dict(model, optimizer, state))
    return [] if not said.startswith("(nothing") and "2.weight" in said else [said]


@world_sizes(2)
@pytest.mark.parametrize(
    "fact",
    rows(
        (
            chapter.must(
                "dcp/state-dict/names",
                "get_model_state_dict of a wrapped model has the names of the bare one.",
            ),
            names,
        ),
        (
            chapter.must(
                "dcp/state-dict/optimizer-names",
                "get_optimizer_state_dict names parameters as the model does, in states and in "
                "groups.",
                rests_on="dcp/state-dict/names",
            ),
            names_of_states,
        ),
        (
            chapter.must(
                "dcp/state-dict/rank-zero",
                "With full_state_dict and cpu_offload only rank 0 has the states.",
                rests_on="dcp/state-dict/optimizer-names",
            ),
            only_on_rank_zero,
        ),
        (
            chapter.must(
                "dcp/state-dict/frozen",
                "With ignore_frozen_params, frozen parameters are left out.",
                rests_on="dcp/state-dict/names",
            ),
            without_frozen,
        ),
        (
            chapter.must(
                "dcp/state-dict/flat",
                "With flatten_optimizer_state_dict each state and each option of a parameter has a "
                "key, and what is set from these is what was.",
                rests_on="dcp/state-dict/optimizer-names",
            ),
            flat,
        ),
        (
            chapter.must(
                "dcp/state-dict/groups-in-another-order",
                "set_optimizer_state_dict gives a group of parameters the options that these had "
                "when the state was taken, whichever place the group had.",
                rests_on="dcp/state-dict/optimizer-names",
            ),
            groups_in_another_order,
        ),
        (
            chapter.must(
                "dcp/state-dict/asked-for",
                "Asking for the state of an optimizer that has not stepped changes no parameter, "
                "no gradient and no option.",
                rests_on="dcp/state-dict/optimizer-names",
            ),
            asked_for,
        ),
        (
            chapter.must(
                "dcp/state-dict/before-the-first-step",
                "Asking for the state of an optimizer that has not stepped has no effect on later "
                "steps.",
                rests_on="dcp/state-dict/asked-for",
            ),
            before_the_first_step,
        ),
        (
            chapter.must(
                "dcp/state-dict/resumed",
                "Training that is resumed from a checkpoint goes on as it would have.",
                rests_on=("dcp/state-dict/optimizer-names", "dcp/nested"),
            ),
            resumed,
        ),
        (
            chapter.must(
                "dcp/state-dict/without-the-wrapper",
                "What was saved of a wrapped model is loaded into a bare one, and the other way "
                "round.",
                rests_on=("dcp/state-dict/names", "dcp/nested"),
            ),
            without_the_wrapper,
        ),
        (
            chapter.must(
                "dcp/state-dict/strict",
                "A missing name is a RuntimeError that has it, unless strict=False, which returns "
                "it.",
                rests_on="dcp/state-dict/names",
            ),
            strict,
        ),
        (
            chapter.must(
                "dcp/state-dict/missing-state",
                "A state that lacks a parameter that is trained is refused with its name.",
                rests_on="dcp/state-dict/optimizer-names",
            ),
            another_optimizer,
        ),
    ),
)
def test_state_dicts(ranks: Ranks, tmp_path: Path, fact: Fact) -> None:
    check_fact(ranks, fact, str(tmp_path / "checkpoint"))

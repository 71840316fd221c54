"""What FSDP's methods return and leave alone, as those of a module do."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn

from conformance import Chapter, Me, Ranks, world_sizes
from conformance.spec.facts import Fact, check_fact, rows, unlike
from conformance.spec.fsdp.models import Net
from conformance.spec.fsdp.state_dict_kinds import FULL, SHARDED
from conformance.spec.fsdp.training_runs import Recipe, wrap

DOCS = "torch 2.13 docs, FullyShardedDataParallel"

chapter = Chapter("fsdp", source=DOCS)

NET = Net()


def itself(me: Me) -> list[str]:
    model = Recipe().wrapped(me)
    results = {
        "apply": model.apply(lambda module: None),
        "eval": model.eval(),
        "train": model.train(),
        "requires_grad_": model.requires_grad_(True),
    }
    return unlike("return the model", {n: r is model for n, r in results.items()}, _all(results))


def _all(names: Any) -> dict[str, bool]:
    return dict.fromkeys(names, True)


def modes(me: Me) -> list[str]:
    """Of a network in evaluation, one of whose layers is in training."""
    network: Any = NET.make()
    network.eval()
    network.head.train()
    layers = dict(network.named_modules())
    model = Recipe().around(me, network)
    found = {name: module.training for name, module in layers.items()}
    model.train()
    after = {name: module.training for name, module in layers.items()}
    want = {name: name == "head" for name in layers}
    return unlike("modes", found, want) + unlike("modes after train()", after, _all(layers))


def earlier_settings(me: Me) -> list[str]:
    model = Recipe().wrapped(me)
    cls = type(model)
    kinds = [cls.set_state_dict_type(model, kind).state_dict_type for kind in (SHARDED, FULL)]
    return unlike("types before", kinds, [FULL, SHARDED])


def dicts_of_the_caller(me: Me) -> list[str]:
    """State dicts that are loaded, a model's and an optimizer's."""
    model = Recipe().wrapped(me)
    cls = type(model)
    optimizer = torch.optim.Adam(model.parameters())
    NET.loss(model, me.rank, 0, me.device).backward()
    optimizer.step()
    states = [model.state_dict(), cls.optim_state_dict(model, optimizer)]
    kept = copy.deepcopy(states)
    model.load_state_dict(states[0])
    cls.optim_state_dict_to_load(model, optimizer, states[1])
    return unlike("the model's", states[0], kept[0]) + unlike("optimizer's", states[1], kept[1])


def not_finite(me: Me) -> list[str]:
    """A gradient of one rank's data overflows."""
    found = []
    for value, want in ((math.inf, math.inf), (math.nan, math.nan)):
        model = wrap(me, nn.Linear(4, 4))
        x = torch.ones(1, 4, device=me.device)
        if me.rank == 0:
            x[0, 1] = value
        model(x).sum().backward()
        norm = model.clip_grad_norm_(1.0).item()
        found += unlike(f"norm of gradients with {value}", repr(norm), repr(want))
    return found


ANSWERS = rows(
    (
        chapter.must(
            "fsdp/returns-itself",
            "apply, train, eval and requires_grad_ return the wrapped model, as a module's do.",
            source="torch 2.13 docs, nn.Module",
        ),
        itself,
    ),
    (
        chapter.must(
            "fsdp/modes-are-kept",
            "Wrapping leaves each module in training or in evaluation, as it was.",
            source="torch 2.13 docs, nn.Module, training",
        ),
        modes,
    ),
    (
        chapter.must(
            "fsdp/earlier-state-dict-type",
            "set_state_dict_type returns the settings that it replaces.",
            source=f"{DOCS}, set_state_dict_type",
        ),
        earlier_settings,
    ),
    (
        chapter.must(
            "fsdp/callers-state-dicts",
            "Loading leaves the state dicts that it is given as they are, a model's and an "
            "optimizer's.",
            source="torch 2.13 docs, nn.Module, load_state_dict; optim_state_dict_to_load",
        ),
        dicts_of_the_caller,
    ),
    (
        chapter.must(
            "fsdp/norm-of-what-overflows",
            "If a gradient is infinite, or no number, so is the norm that clip_grad_norm_ returns.",
            source=f"{DOCS}, clip_grad_norm_; it computes what torch.nn.utils' does",
        ),
        not_finite,
    ),
)


@world_sizes(2)
@pytest.mark.parametrize("fact", ANSWERS)
def test_answers(ranks: Ranks, fact: Fact) -> None:
    check_fact(ranks, fact)

"""FSDP in programs of their own, with nothing in common but the group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from conformance import (
    Chapter,
    Me,
    Ranks,
    assert_same_on_all_ranks,
    deadline,
    not_probed,
    world_sizes,
)
from conformance.spec.fsdp.optimizer_state import change_on_the_way
from conformance.spec.fsdp.state_dict_kinds import (
    FULL,
    ON_DEVICE,
    SHARDED,
    SHARDS,
    adam,
    bare_training,
    by_name,
    saved,
    tensors,
)
from conformance.spec.fsdp.training_runs import (
    check_tensors,
    full_parameters,
    trained,
)
from conformance.spec.separate_programs import LIMIT_S, run_in_programs

chapter = Chapter("fsdp")


RECIPES = (adam(orig=False), adam(orig=True))


@dataclass(frozen=True)
class Saved:
    """What training gave, on the host. changes: of the optimizer's state, by saving and loading."""

    parameters: dict[str, Tensor]
    state: dict[str, Tensor]
    changes: list[str]


def train_and_save(me: Me) -> list[Saved]:
    """By recipe: full parameters, full optimizer state, and changes, full and sharded."""
    kinds: list[Any] = [(FULL, ON_DEVICE), (SHARDED, SHARDS)]
    done = []
    for recipe in RECIPES:
        model, optimizer = trained(me, recipe)
        state = tensors(saved(model, optimizer, FULL, ON_DEVICE))
        done.append(
            Saved(
                {name: param.cpu() for name, param in full_parameters(model).items()},
                {name: value.cpu() for name, value in state.items()},
                [change_on_the_way(model, optimizer, kind, config) for kind, config in kinds],
            )
        )
    return done


@chapter.must(
    "fsdp/separate-programs",
    "Ranks that were started as programs of their own, as torchrun starts them, train, save and "
    "load like forks of one process: nothing depends on the order of a set, which differs there.",
    source="Megatron-LM#2218",
    rests_on=("fsdp/full-optimizer-state", "fsdp/optimizer-state-loads"),
)
@not_probed()
@world_sizes(2)
@deadline(LIMIT_S + 30)
def test_programs_train_and_save(bare_ranks: Ranks) -> None:
    got = run_in_programs(bare_ranks, train_and_save)
    for recipe, runs in zip(RECIPES, zip(*got, strict=True), strict=True):
        model, optimizer = bare_training(recipe, len(runs))
        check_tensors([run.parameters for run in runs], [dict(model.named_parameters())] * 2, 1e-6)
        check_tensors([run.state for run in runs], [by_name(model, optimizer)] * 2, within=1e-6)
        assert_same_on_all_ranks([run.changes for run in runs], want=["", ""])

"""FSDP optimizer state that does not fit: missing on a rank, unknown names, wrong shapes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from conformance import Chapter, Me, Ranks, assert_that, world_sizes
from conformance.checks.compare import first_difference
from conformance.spec.fsdp.state_dict_kinds import FULL, ON_DEVICE, adam, loadable, saved
from conformance.spec.fsdp.training_runs import trained
from conformance.spec.raising import assert_raised

chapter = Chapter("fsdp")


def lose_state(me: Me) -> None:
    """The last rank has lost the state of its first parameter."""
    model, optimizer = trained(me, adam())
    own = optimizer.state_dict()
    if me.rank == me.world_size - 1:
        del own["state"][0]
    type(model).optim_state_dict(model, optimizer, own)


@chapter.must(
    "fsdp/optimizer-state-missing",
    "If a rank lacks the state of a parameter that another rank has, optim_state_dict raises "
    "RuntimeError on every rank and names the parameter.",
    source="observed, torch 2.13.0",
)
@world_sizes(2, 3)
def test_state_that_a_rank_lacks(ranks: Ranks) -> None:
    last = ranks.world_size - 1
    assert_raised(ranks.outcomes(lose_state), RuntimeError, match=f"Rank {last} is missing.*states")


def load_spoilt(me: Me, spoil: Callable[[dict[str, Any]], None]) -> None:
    model, optimizer = trained(me, adam())
    state = saved(model, optimizer, FULL, ON_DEVICE)
    spoil(state)
    before = copy.deepcopy(optimizer.state_dict())
    try:
        loadable(model, optimizer, state, FULL, ON_DEVICE)
    except (KeyError, RuntimeError, ValueError):
        found = first_difference(optimizer.state_dict(), before)
        assert_that(found is None, f"the optimizer was changed: {found}", me.rank)
        raise


def add_a_name(state: dict[str, Any]) -> None:
    state["param_groups"][0]["params"].append("unknown")


def change_a_shape(state: dict[str, Any]) -> None:
    state["state"]["head.weight"]["exp_avg"] = torch.ones(2, 2, dtype=torch.float64)


@chapter.must(
    "fsdp/optimizer-state-of-nobody",
    "Optimizer state for a parameter group with an unknown name raises KeyError with that name.",
    source="observed, torch 2.13.0",
)
@world_sizes(2)
def test_a_name_that_nobody_has(ranks: Ranks) -> None:
    assert_raised(ranks.outcomes(load_spoilt, add_a_name), KeyError, match="unknown")


@chapter.must(
    "fsdp/optimizer-state-of-wrong-shape",
    "Optimizer state whose shape is not the parameter's raises an error on every rank, and none "
    "is loaded.",
    source="torch 2.13, _flatten_optim_state",
)
@world_sizes(2)
def test_a_wrong_shape(ranks: Ranks) -> None:
    outcomes = ranks.outcomes(load_spoilt, change_a_shape)
    assert_raised(outcomes, ValueError, RuntimeError, match="shape")

"""What the reentrant kind of checkpoint cannot do, and the words in which that is said."""

from __future__ import annotations

import pytest

from conformance import Me, Ranks, assert_same_on_all_ranks, assert_that, covers, world_sizes
from conformance.cases.checkpointing.networks import (
    DYNAMIC,
    EVERY_LAYER,
    EVERY_TIED,
    NON_REENTRANT,
    ONCE,
    REENTRANT,
    TWICE,
    TWICE_TIED,
    WHOLE,
    Recipe,
)
from conformance.cases.checkpointing.training import (
    CAP,
    SEARCHING,
    STATIC,
    VIEWS,
    Options,
    batch,
    loss_of,
    take_steps,
)
from conformance.cases.raising import assert_raised

_READY_ONCE = r"Expected to mark a variable ready only once\."
_view = pytest.mark.parametrize("options", VIEWS, ids=["copies", "views"])


@covers("checkpointing/reentrant-twice-refused")
@world_sizes(2)
@_view
@pytest.mark.parametrize("recipe", [TWICE, TWICE_TIED, EVERY_TIED], ids=["twice", "both", "tied"])
def test_parameters_in_several_reentrant_checkpoints(
    ranks: Ranks, recipe: Recipe, options: Options
) -> None:
    outcomes = ranks.outcomes(take_steps, recipe, REENTRANT, options)
    assert_raised(outcomes, RuntimeError, match=_READY_ONCE)


@covers("checkpointing/reentrant-search-refused")
@world_sizes(2)
@pytest.mark.parametrize("options", SEARCHING, ids=["copies", "views"])
@pytest.mark.parametrize("recipe", [ONCE, EVERY_LAYER, WHOLE], ids=["once", "each", "whole"])
def test_a_search_does_not_see_into_reentrant_checkpoints(
    ranks: Ranks, recipe: Recipe, options: Options
) -> None:
    outcomes = ranks.outcomes(take_steps, recipe, REENTRANT, options)
    assert_raised(outcomes, RuntimeError, match=_READY_ONCE)


@covers("checkpointing/reentrant-by-turns-refused")
@world_sizes(2)
@pytest.mark.parametrize("options", SEARCHING, ids=["copies", "views"])
def test_reentrant_checkpoints_that_run_by_turns(ranks: Ranks, options: Options) -> None:
    outcomes = ranks.outcomes(take_steps, DYNAMIC, REENTRANT, options)
    assert_raised(outcomes, RuntimeError, match=_READY_ONCE)


@covers("checkpointing/names-the-parameter")
@world_sizes(2)
def test_the_error_says_which_parameter(ranks: Ranks) -> None:
    """The layer that runs twice has the parameters 2 and 3."""
    outcomes = ranks.outcomes(take_steps, TWICE, REENTRANT, CAP)
    assert_raised(
        outcomes,
        RuntimeError,
        match=r"Parameter at index [23] .*has been marked as ready twice",
    )


@covers("checkpointing/advises-static-graph")
@world_sizes(2)
def test_the_error_says_what_helps(ranks: Ranks) -> None:
    outcomes = ranks.outcomes(take_steps, TWICE, REENTRANT, CAP)
    assert_raised(outcomes, RuntimeError, match=r"_set_static_graph\(\) as a workaround")


@covers("checkpointing/graph-changed")
@world_sizes(2)
@pytest.mark.parametrize("how", [REENTRANT, NON_REENTRANT])
def test_a_static_graph_that_changes(ranks: Ranks, how: str) -> None:
    outcomes = ranks.outcomes(take_steps, DYNAMIC, how, STATIC[0])
    assert_raised(outcomes, RuntimeError, match="Your training graph has changed in this iteration")


@covers("checkpointing/unfinished")
@world_sizes(2)
@pytest.mark.parametrize("how", [REENTRANT, NON_REENTRANT])
def test_unused_parameters_that_nobody_searches_for(ranks: Ranks, how: str) -> None:
    outcomes = ranks.outcomes(take_steps, DYNAMIC, how, CAP)
    assert_raised(
        outcomes, RuntimeError, match="Expected to have finished reduction in the prior iteration"
    )


def train_after_an_error(me: Me) -> tuple[str, list[object]]:
    """What a refused step said; then steps of a new wrapper in the same group."""
    said = ""
    x = batch(me.rank, 0).to(me.device).requires_grad_()
    model = me.ddp(TWICE.make(REENTRANT).to(me.device), **CAP)
    try:
        loss_of(model(x)).backward()
    except RuntimeError as error:
        said = str(error)
    return said, list(take_steps(me, TWICE, NON_REENTRANT, CAP))


def train_without_an_error(me: Me) -> list[object]:
    """The same steps in a fresh world."""
    return list(take_steps(me, TWICE, NON_REENTRANT, CAP))


@covers("checkpointing/after-an-error")
@world_sizes(2)
def test_a_new_wrapper_trains_after_an_error(ranks: Ranks) -> None:
    got = ranks.run(train_after_an_error)
    for rank, (said, _) in enumerate(got):
        assert_that("ready only once" in said, f"the first step was not refused: {said!r}", rank)
    ranks.renew()
    want = ranks.run(train_without_an_error)
    assert_same_on_all_ranks([steps for _, steps in got], want[0])

"""Uses of reentrant activation checkpoints under DDP that may raise, and training after the error.

torch refuses it. A target that trains as if there were no checkpoints is as good.
"""

from __future__ import annotations

import pytest

from conformance import Chapter, Me, Ranks, assert_same_on_all_ranks, assert_that, world_sizes
from conformance.harness.outcome import Returned
from conformance.spec.checkpointing.networks import (
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
from conformance.spec.checkpointing.training import (
    CAP,
    SEARCHING,
    STATIC,
    STEPS,
    VIEWS,
    Options,
    batch,
    loss_of,
    take_steps,
    whole_steps,
)
from conformance.spec.ddp.training_runs import assert_trained
from conformance.spec.raising import assert_raised

SUITE = "torch, test_c10d_common.py"

chapter = Chapter("checkpointing", needs="device:autocast")


_READY_ONCE = r"Expected to mark a variable ready only once\."


def assert_right_or_refused(
    ranks: Ranks, recipe: Recipe, options: Options, match: str = _READY_ONCE
) -> None:
    """All ranks train what one process would, or all raise, with a message that matches."""
    outcomes = ranks.outcomes(take_steps, recipe, REENTRANT, options)
    trained = [outcome.value for outcome in outcomes if isinstance(outcome, Returned)]
    if len(trained) == len(outcomes):
        assert_trained(trained, whole_steps(recipe, ranks.world_size, STEPS))
    else:
        assert_raised(outcomes, RuntimeError, match=match)


_view = pytest.mark.parametrize("options", VIEWS, ids=["copies", "views"])


@chapter.must(
    "checkpointing/reentrant-twice-refused",
    "Without a static graph, parameters that are used in several reentrant checkpoints are "
    "trained as without checkpoints, or raise RuntimeError 'Expected to mark a variable ready "
    "only once.' on every rank.",
    source=f"{SUITE}, test_ddp_checkpointing_twice",
    rests_on="checkpointing/once",
)
@world_sizes(2)
@_view
@pytest.mark.parametrize("recipe", [TWICE, TWICE_TIED, EVERY_TIED], ids=["twice", "both", "tied"])
def test_parameters_in_several_reentrant_checkpoints(
    ranks: Ranks, recipe: Recipe, options: Options
) -> None:
    assert_right_or_refused(ranks, recipe, options)


@chapter.must(
    "checkpointing/reentrant-search-refused",
    "find_unused_parameters need not see into reentrant checkpoints: what they use is trained as "
    "without checkpoints, or raises RuntimeError 'Expected to mark a variable ready only once.' "
    "on every rank; no gradient is silently taken for zero.",
    source=f"{SUITE}, test_ddp_checkpointing_unused_params; pytorch#24005",
    rests_on="checkpointing/once",
)
@world_sizes(2)
@pytest.mark.parametrize("options", SEARCHING, ids=["copies", "views"])
@pytest.mark.parametrize("recipe", [ONCE, EVERY_LAYER, WHOLE], ids=["once", "each", "whole"])
def test_a_search_does_not_see_into_reentrant_checkpoints(
    ranks: Ranks, recipe: Recipe, options: Options
) -> None:
    assert_right_or_refused(ranks, recipe, options)


@chapter.must(
    "checkpointing/reentrant-by-turns-refused",
    "With find_unused_parameters, a module that runs a different layer at each step in a "
    "reentrant checkpoint is trained as without checkpoints, or raises RuntimeError 'Expected to "
    "mark a variable ready only once.' on every rank.",
    source=f"{SUITE}, test_ddp_checkpointing_dynamic_module",
    rests_on="checkpointing/once",
)
@world_sizes(2)
@pytest.mark.parametrize("options", SEARCHING, ids=["copies", "views"])
def test_reentrant_checkpoints_that_run_by_turns(ranks: Ranks, options: Options) -> None:
    assert_right_or_refused(ranks, DYNAMIC, options)


@chapter.should(
    "checkpointing/names-the-parameter",
    "The error about a parameter that is ready more than once names it by its index.",
    source="torch, reducer.cpp: 'Parameter at index 3 has been marked as ready twice'",
    rests_on="checkpointing/reentrant-twice-refused",
)
@world_sizes(2)
def test_the_error_says_which_parameter(ranks: Ranks) -> None:
    """The layer that runs twice has the parameters 2 and 3."""
    named = r"Parameter at index [23] .*has been marked as ready twice"
    assert_right_or_refused(ranks, TWICE, CAP, match=named)


@chapter.should(
    "checkpointing/advises-static-graph",
    "The error about a parameter that is ready more than once advises _set_static_graph(), which "
    "helps if the graph does not change.",
    source="torch, reducer.cpp, mark_variable_ready; observed, torch 2.13.0",
    rests_on="checkpointing/reentrant-twice-refused",
)
@world_sizes(2)
def test_the_error_says_what_helps(ranks: Ranks) -> None:
    advice = r"_set_static_graph\(\) as a workaround"
    assert_right_or_refused(ranks, TWICE, CAP, match=advice)


@chapter.must(
    "checkpointing/graph-changed",
    "With a static graph, a step whose checkpoints use other parameters than those of the first "
    "step raises RuntimeError 'Your training graph has changed in this iteration' on every rank.",
    source="torch, reducer.cpp; observed, torch 2.13.0",
    rests_on="checkpointing/once",
)
@world_sizes(2)
@pytest.mark.parametrize("how", [REENTRANT, NON_REENTRANT])
def test_a_static_graph_that_changes(ranks: Ranks, how: str) -> None:
    outcomes = ranks.outcomes(take_steps, DYNAMIC, how, STATIC[0])
    assert_raised(outcomes, RuntimeError, match="Your training graph has changed in this iteration")


@chapter.must(
    "checkpointing/unfinished",
    "Without find_unused_parameters or a static graph, a step that leaves parameters out makes "
    "the next forward pass raise RuntimeError 'Expected to have finished reduction in the prior "
    "iteration before starting a new one' on every rank.",
    source="torch, reducer.cpp, ensure_prior_reduction_finished",
    rests_on="checkpointing/once",
)
@world_sizes(2)
@pytest.mark.parametrize("how", [REENTRANT, NON_REENTRANT])
def test_unused_parameters_that_nobody_searches_for(ranks: Ranks, how: str) -> None:
    outcomes = ranks.outcomes(take_steps, DYNAMIC, how, CAP)
    assert_raised(
        outcomes, RuntimeError, match="Expected to have finished reduction in the prior iteration"
    )


def train_after_an_error(me: Me) -> tuple[str, list[object]]:
    """What a refused step said, if it was refused; then steps of a new wrapper in the group."""
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


@chapter.should(
    "checkpointing/after-an-error",
    "After a step that was refused, a new wrapper trains as usual in the same group.",
    source="observed, torch 2.13.0: all ranks issue the same operations before they raise",
    rests_on=("checkpointing/reentrant-twice-refused", "checkpointing/twice"),
)
@world_sizes(2)
def test_a_new_wrapper_trains_after_an_error(ranks: Ranks) -> None:
    got = ranks.run(train_after_an_error)
    for rank, (said, _) in enumerate(got):
        as_others = bool(said) == bool(got[0][0])
        assert_that(as_others, f"ranks do not agree on the first step, {said!r}", rank)
        is_known = not said or "ready only once" in said
        assert_that(is_known, f"the first step was refused in other words: {said!r}", rank)
    ranks.renew()
    want = ranks.run(train_without_an_error)
    assert_same_on_all_ranks([steps for _, steps in got], want[0])

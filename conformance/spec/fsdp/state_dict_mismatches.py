"""Loading FSDP state dicts with missing or unexpected keys, or wrong shapes; strict=False."""

from __future__ import annotations

import torch

from conformance import Chapter, Me, Ranks, assert_same_on_all_ranks, assert_that, world_sizes
from conformance.spec.fsdp.state_dict_kinds import SHARDED
from conformance.spec.fsdp.training_runs import (
    Recipe,
    both_kinds,
)
from conformance.spec.raising import assert_raised

DOCS = "torch 2.13 docs, FullyShardedDataParallel"

chapter = Chapter("fsdp")


def load_wrong(me: Me, recipe: Recipe, what: str) -> tuple[str, bool]:
    """What loading says, and whether the model still gives its loss and its own state dict."""
    model = recipe.wrapped(me)
    state = dict(model.state_dict())
    if what == "missing":
        del state["blocks.1.up.weight"]
    elif what == "extra":
        state["blocks.1.more"] = torch.ones(1)
    else:
        state["head.weight"] = torch.ones(2, 2, dtype=torch.float64)
    try:
        model.load_state_dict(state)
        said = "nothing"
    except RuntimeError as error:
        said = str(error)
    recipe.net.loss(model, me.rank, 0, me.device).backward()
    return said, list(model.state_dict()) == list(recipe.net.make().state_dict())


def check_wrong(ranks: Ranks, what: str, *words: str) -> None:
    for orig in (False, True):
        for rank, (said, usable) in enumerate(ranks.run(load_wrong, Recipe(orig=orig), what)):
            right = all(word in said for word in words)
            assert_that(right, f"said {said}, want {words}", rank)
            assert_that(usable, "the model has another state dict afterwards", rank)


@chapter.must(
    "fsdp/missing-key",
    "Loading with a missing key raises RuntimeError that names it as the bare module does, and "
    "does not harm any other instance: the model stays usable.",
    source="torch.nn.Module.load_state_dict",
)
@world_sizes(2)
def test_a_missing_key(ranks: Ranks) -> None:
    check_wrong(ranks, "missing", "Missing key", "blocks.1.up.weight")


@chapter.must(
    "fsdp/unexpected-key",
    "Loading with an extra key raises RuntimeError that names it.",
    source="torch.nn.Module.load_state_dict",
)
@world_sizes(2)
def test_an_unexpected_key(ranks: Ranks) -> None:
    check_wrong(ranks, "extra", "Unexpected key", "blocks.1.more")


@chapter.must(
    "fsdp/wrong-shape",
    "Loading an entry of the wrong shape raises RuntimeError 'size mismatch for' with its name.",
    source="torch.nn.Module.load_state_dict",
)
@world_sizes(2)
def test_a_wrong_shape(ranks: Ranks) -> None:
    check_wrong(ranks, "shape", "size mismatch for", "head.weight")


def load_partly(me: Me, recipe: Recipe) -> tuple[list[str], list[str], bool]:
    """Missing and unexpected keys, and whether the rest was loaded."""
    model = recipe.wrapped(me)
    state = dict(recipe.net.make(7, me.device).state_dict())
    want = state["blocks.0.up.bias"].clone()
    del state["head.weight"]
    state["more"] = torch.ones(1)
    found = model.load_state_dict(state, strict=False)
    same = torch.equal(model.state_dict()["blocks.0.up.bias"], want)
    return list(found.missing_keys), list(found.unexpected_keys), same


@chapter.must(
    "fsdp/not-strict",
    "With strict=False, missing and unexpected keys are reported, and the keys that match are "
    "loaded.",
    source="torch.nn.Module.load_state_dict",
)
@world_sizes(2)
@both_kinds
def test_loading_partly(ranks: Ranks, orig: bool) -> None:
    got = ranks.run(load_partly, Recipe(orig=orig))
    assert_same_on_all_ranks(got, (["head.weight"], ["more"], True), what="what was told")


def load_sharded_without(me: Me, recipe: Recipe) -> None:
    model = recipe.wrapped(me)
    with type(model).state_dict_type(model, SHARDED):
        state = model.state_dict()
        del state["blocks.1.up.weight"]
        model.load_state_dict(state)


@chapter.must(
    "fsdp/sharded-missing-key",
    "Loading a sharded state dict with a missing key raises an error that names it, on every rank.",
    source="torch.nn.Module.load_state_dict",
)
@world_sizes(2)
def test_a_missing_key_of_shards(ranks: Ranks) -> None:
    outcomes = ranks.outcomes(load_sharded_without, Recipe())
    assert_raised(outcomes, RuntimeError, KeyError, match=r"blocks\.1\.(.*\.)?up\.weight")

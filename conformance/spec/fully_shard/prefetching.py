"""When units are gathered: as they are needed, one ahead in backward, or as the user has said."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

from conformance import Chapter, Me, Ranks, world_sizes
from conformance.checks.traces import assert_same_trace
from conformance.spec.facts import check_fact, rows, unlike
from conformance.spec.fsdp.models import Net
from conformance.spec.fully_shard.recipes import Recipe, mesh_over
from conformance.spec.fully_shard.recording import Log, logged

NEEDS = ("op:all_gather_into_tensor", "op:reduce_scatter_tensor", "dtype:float64", "reduce_op:sum")
METHODS = "torch 2.13 docs, FSDPModule"

chapter = Chapter("fully_shard", source=METHODS, needs=NEEDS)

NET = Net(blocks=3)


def by_default(blocks: Any) -> None:
    """Nothing is set."""


def next_in_forward(blocks: Any) -> None:
    for one, following in itertools.pairwise(blocks):
        one.set_modules_to_forward_prefetch([following])


def two_in_forward(blocks: Any) -> None:
    blocks[0].set_modules_to_forward_prefetch([blocks[1], blocks[2]])


def another_choice_in_forward(blocks: Any) -> None:
    two_in_forward(blocks)
    blocks[0].set_modules_to_forward_prefetch([blocks[1]])


def two_in_backward(blocks: Any) -> None:
    blocks[2].set_modules_to_backward_prefetch([blocks[1], blocks[0]])


def none_ahead_in_backward(blocks: Any) -> None:
    """Each block asks for one that is there already."""
    for block in blocks:
        block.set_modules_to_backward_prefetch([block])


def what_happens(me: Me, settings: Any) -> tuple[list[str], list[str]]:
    """Forwards, backwards and gathers of blocks, in a second step; gathers as counts so far."""
    network: Any = NET.make(device=me.device)
    model, log = logged(me, Recipe(net=NET), network=network)
    log.on_blocks(network)
    settings(model.blocks)
    seen = []
    for step in range(2):
        log.take()
        loss = NET.loss(model, me.rank, step, me.device)
        seen = [log.take()]
        loss.backward()
        seen.append(log.take())
    forward, backward = (_short(lines) for lines in seen)
    return forward, backward


def _short(lines: list[str]) -> list[str]:
    """Without sizes, and without reductions."""
    return [
        "gather" if line.startswith("gather") else line
        for line in lines
        if line.startswith(("gather", "forward", "backward"))
    ]


# Letters: g a gather, 0 1 2 the forward or the end of the backward of this block. The first gather
# of a forward is the root's.
ORDERS = rows(
    (
        chapter.must(
            "fully_shard/no-forward-prefetch",
            "By default a unit is gathered when its own forward begins, and no sooner.",
        ),
        (by_default, "gg0g1g2", None),
    ),
    (
        chapter.must(
            "fully_shard/backward-prefetch",
            "By default, when the backward of a unit begins, the unit whose forward came before it "
            "is gathered too, before the gradients are computed.",
        ),
        (by_default, None, "gg2g10"),
    ),
    (
        chapter.must(
            "fully_shard/forward-prefetch",
            "What set_modules_to_forward_prefetch names is gathered when the forward of the module "
            "begins, after the module itself.",
        ),
        (next_in_forward, "ggg0g12", None),
    ),
    (
        chapter.must(
            "fully_shard/several-in-forward",
            "Several modules may be prefetched in a forward, in the order in which they are named.",
        ),
        (two_in_forward, "gggg012", None),
    ),
    (
        chapter.must(
            "fully_shard/forward-prefetch-anew",
            "What set_modules_to_forward_prefetch names replaces what it has named before.",
        ),
        (another_choice_in_forward, "ggg01g2", None),
    ),
    (
        chapter.must(
            "fully_shard/several-in-backward",
            "What set_modules_to_backward_prefetch names is gathered when the backward of the "
            "module begins, in the place of the unit before it.",
        ),
        (two_in_backward, None, "ggg210"),
    ),
    (
        chapter.must(
            "fully_shard/no-backward-prefetch",
            "Modules that are there already are not gathered again, so prefetching can be turned "
            "off.",
        ),
        (none_ahead_in_backward, None, "g2g1g0"),
    ),
)


def _lines(letters: str, what: str) -> list[str]:
    return ["gather" if letter == "g" else f"{what} {letter}" for letter in letters]


@world_sizes(2)
@pytest.mark.parametrize("order", ORDERS)
def test_when_units_are_gathered(ranks: Ranks, order: Any) -> None:
    settings, *wanted = order
    for seen in ranks.run(what_happens, settings):
        for what, got, want in zip(("forward", "backward"), seen, wanted, strict=True):
            if want is not None:
                assert_same_trace(got, _lines(want, what), what)


def gathers_of_an_embedding(me: Me) -> list[str]:
    """The backward of an embedding needs no parameters."""
    log = Log(me)
    layers = nn.Embedding(4, 3, device=me.device), nn.Linear(3, 2, device=me.device)
    model: Any = nn.Sequential(*(layer.double() for layer in layers))
    mesh = mesh_over(me, log.group)
    for module in (layers[0], model):
        me.fully_shard(module, mesh=mesh)
    seen = []
    for gathers in (True, False):
        model[0].set_unshard_in_backward(gathers)
        loss = model(torch.arange(4, device=me.device)).sum()
        log.take()
        loss.backward()
        seen.append(sum(line.startswith("gather") for line in log.take()))
    return unlike("gathers in the backward", seen, [1, 0])


@chapter.must(
    "fully_shard/no-unshard-in-backward",
    "A module with set_unshard_in_backward(False), such as an embedding, is not gathered in the "
    "backward.",
)
@world_sizes(2)
def test_an_embedding(ranks: Ranks) -> None:
    check_fact(ranks, gathers_of_an_embedding)


def around_a_module_without_parameters(me: Me) -> list[str]:
    """All parameters of a sharded module in the middle belong to units below it."""
    log = Log(me)
    first, second, third, last = (
        nn.Linear(2, 2, device=me.device, dtype=torch.float64) for _ in range(4)
    )
    middle = nn.Sequential(second, third)
    model: Any = nn.Sequential(first, middle, last)
    mesh = mesh_over(me, log.group)
    for module in (first, second, third, middle, last, model):
        me.fully_shard(module, mesh=mesh)
    loss = model(torch.ones(3, 2, device=me.device, dtype=torch.float64)).sum()
    log.take()
    loss.backward()
    seen = " ".join(line.split()[0] for line in log.take())
    return unlike("backward", seen, "gather gather scatter" + 2 * " gather scatter" + " scatter")


@chapter.must(
    "fully_shard/prefetch-past-empty",
    "A sharded module without parameters of its own is passed over by prefetching: when the "
    "backward of the unit behind it begins, the last unit inside of it is gathered.",
    source="torch 2.13, FSDPParamGroup.post_forward",
)
@world_sizes(2)
def test_a_module_without_parameters(ranks: Ranks) -> None:
    check_fact(ranks, around_a_module_without_parameters)

"""Parameters that are not used or not trained, activation checkpointing, and exceptions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import fully_shard as torchs
from torch.utils.checkpoint import checkpoint

from conformance import Chapter, Me, Ranks, world_sizes
from conformance.checks.traces import assert_same_trace
from conformance.spec.facts import Fact, check_fact, rows, unlike
from conformance.spec.fsdp.models import Block, Net
from conformance.spec.fully_shard.recipes import (
    Recipe,
    Run,
    check_runs,
    everywhere,
    gradients_of,
    mesh_over,
    part_of,
    sharded,
    train,
    train_whole,
)
from conformance.spec.fully_shard.recording import Log, logged, run
from conformance.spec.fully_shard.settings import scaled
from conformance.spec.fully_shard.versions import needs_method

NEEDS = ("op:all_gather_into_tensor", "op:reduce_scatter_tensor", "dtype:float64", "reduce_op:sum")

chapter = Chapter("fully_shard", source="torch 2.13 docs, fully_shard", needs=NEEDS)

NET = Net()


class Skipping(Block):
    """A block that some ranks leave out; it is the identity there."""

    skips = False

    def forward(self, x: Tensor) -> Tensor:
        return x + 0 * x if self.skips else super().forward(x)


def skipping_network(me: Me, *skipping: int) -> Any:
    """The network whose first block these ranks leave out."""
    network: Any = NET.make(device=me.device)
    network.blocks[0].__class__ = Skipping
    network.blocks[0].skips = me.rank in skipping
    return network


def backward(me: Me, model: Any, number: int = 0) -> None:
    NET.loss(model, me.rank, number, me.device).backward()


def unused_unit(me: Me) -> list[str]:
    model, log = logged(me, Recipe(), network=skipping_network(me, *range(me.world_size)))
    backward(me, model)
    scatters = sum(line.startswith("scatter") for line in log.take())
    grads = {name: g for name, g in gradients_of(model).items() if name.startswith("blocks.0")}
    found = unlike("gradients of the unused unit", set(grads.values()), {None})
    return found + unlike("reductions", scatters, 2)


def unused_parameter(me: Me) -> list[str]:
    network: Any = NET.make(device=me.device)
    network.extra = nn.Parameter(torch.ones(4, dtype=torch.float64, device=me.device))
    model = sharded(me, Recipe(), network)
    backward(me, model)
    found = unlike("gradient of an unused parameter", model.extra.grad, None)
    return found + scaled(me, model, 1.0)


def used_before(me: Me) -> list[str]:
    """In the first of two backwards, of which the second one is reduced."""
    model = sharded(me, Recipe(), skipping_network(me))
    model.set_requires_gradient_sync(False)
    backward(me, model)
    model.set_requires_gradient_sync(True)
    model.blocks[0].skips = True
    backward(me, model, 1)
    bare = skipping_network(me)
    for number in (0, 1):
        bare.blocks[0].skips = number == 1
        for rank in range(me.world_size):
            (NET.loss(bare, rank, number, me.device) / me.world_size).backward()
    want = part_of(bare.blocks[0].up.weight.grad, me.world_size, me.rank)
    got = gradients_of(model)["blocks.0.up.weight"]
    if got is None or not torch.allclose(got, want, rtol=1e-7, atol=1e-10):
        return [f"gradient of blocks.0.up.weight: got {got}, want {want}"]
    return []


def unused_on_a_rank(me: Me) -> list[str]:
    """Rank 0 leaves a block out, and counts as zero in the mean; not for what is frozen."""
    network = skipping_network(me, 0)
    network.blocks[0].down.weight.requires_grad_(False)
    model = sharded(me, Recipe(), network)
    everywhere(model, "set_reduce_scatter_unused_params", True)
    backward(me, model)
    block = model.blocks[0]
    found = unlike("there is a gradient", block.up.weight.grad is not None, True)
    return found + unlike("gradient of a frozen parameter", block.down.weight.grad, None)


def frozen_is_not_reduced(me: Me) -> list[str]:
    model, log = logged(me, Recipe(net=Net(frozen="block")))
    backward(me, model)
    return unlike("reductions", sum(line.startswith("scatter") for line in log.take()), 2)


def frozen_later(me: Me) -> list[str]:
    model, log = logged(me, Recipe())
    backward(me, model)
    model.zero_grad()
    model.blocks[0].requires_grad_(False)
    log.take()
    backward(me, model, 1)
    found = unlike("reductions when frozen", sum(x.startswith("scatter") for x in log.take()), 2)
    model.zero_grad()
    model.blocks[0].requires_grad_(True)
    backward(me, model)
    return found + scaled(me, model, 1.0)


def dropped_forward(me: Me) -> list[str]:
    model = sharded(me, Recipe())
    NET.loss(model, me.rank, 5, me.device)
    backward(me, model)
    return scaled(me, model, 1.0)


def evaluated_before(me: Me) -> list[str]:
    model = sharded(me, Recipe())
    with torch.no_grad():
        NET.loss(model, me.rank, 5, me.device)
    backward(me, model)
    return scaled(me, model, 1.0)


def two_backwards(me: Me) -> list[str]:
    """Through the same graph: the second one gathers what the first one has freed."""
    model = sharded(me, Recipe())
    loss = NET.loss(model, me.rank, 0, me.device)
    loss.backward(retain_graph=True)
    loss.backward()
    return scaled(me, model, 2.0)


USES = rows(
    (
        chapter.must(
            "fully_shard/unused-unit",
            "A unit that no rank uses gets no gradients, and nothing is reduced for it.",
        ),
        unused_unit,
    ),
    (
        chapter.must(
            "fully_shard/unused-parameter",
            "A parameter that no rank uses gets no gradient; the others of its unit do.",
            source="torch 2.13, FSDPParamGroup.post_backward",
        ),
        unused_parameter,
    ),
    (
        chapter.must(
            "fully_shard/unused-in-the-last-backward",
            "A unit that only the earlier backwards of an accumulation have used gets the mean of "
            "their gradients.",
        ),
        used_before,
    ),
    (
        chapter.must(
            "fully_shard/frozen-is-not-reduced",
            "For a unit of frozen parameters nothing is reduced.",
        ),
        frozen_is_not_reduced,
    ),
    (
        chapter.must(
            "fully_shard/frozen-later",
            "Shards may be frozen and thawed between steps: the next step follows.",
            source="torch 2.13, FSDPParam.to_unsharded",
        ),
        frozen_later,
    ),
    (
        chapter.must(
            "fully_shard/dropped-forward",
            "A forward whose output is dropped changes no gradient of the next step.",
        ),
        dropped_forward,
    ),
    (
        chapter.must(
            "fully_shard/evaluation-before-training",
            "A forward without gradients, also as the first one, changes no gradient of the next "
            "step.",
        ),
        evaluated_before,
    ),
    (
        chapter.must(
            "fully_shard/retained-graph",
            "A second backward through a graph that was retained adds the same gradients.",
            source="torch docs, Tensor.backward, retain_graph",
        ),
        two_backwards,
    ),
)


@world_sizes(2)
@pytest.mark.parametrize("fact", USES)
def test_partial_use(ranks: Ranks, fact: Fact) -> None:
    check_fact(ranks, fact)


@chapter.must(
    "fully_shard/unused-on-a-rank",
    "With set_reduce_scatter_unused_params, ranks that have not used a unit count as zero in the "
    "mean.",
    source="torch 2.13 docs, FSDPModule, set_reduce_scatter_unused_params",
)
@world_sizes(2)
@needs_method("set_reduce_scatter_unused_params")
def test_a_unit_that_one_rank_leaves_out(ranks: Ranks) -> None:
    check_fact(ranks, unused_on_a_rank)


# Activation checkpointing


class Recomputing(Block):
    """Its forward runs again in the backward, within the unit."""

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return result


class RecomputingReentrant(Block):
    """As before, in a backward within the backward."""

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(super().forward, x, use_reentrant=True)
        return result


def recomputing(me: Me, how: str, mesh: Any = None, shard: Any = None) -> Any:
    """The model with blocks that recompute their activations.

    how: "inside" of their unit, "reentrant" the same in another way, with a checkpointed module
        "below" the unit, or with the checkpoint "around" it.
    """
    network: Any = NET.make(device=me.device)
    for index, block in enumerate(network.blocks):
        if how in ("inside", "reentrant"):
            block.__class__ = Recomputing if how == "inside" else RecomputingReentrant
        elif how == "below":
            network.blocks[index] = checkpoint_wrapper(block, CheckpointImpl.NO_REENTRANT)
    model = sharded(me, Recipe(), network, mesh, shard)
    if how == "around":
        for index, block in enumerate(network.blocks):
            network.blocks[index] = checkpoint_wrapper(block, CheckpointImpl.NO_REENTRANT)
    return model


def train_recomputing(me: Me, how: str) -> Run:
    got = train(me, Recipe(), recomputing(me, how))
    grads, params = (
        {name.replace("_checkpoint_wrapped_module.", ""): x for name, x in named.items()}
        for named in (got.grads, got.params)
    )
    return Run(got.losses, grads, params)  # type: ignore[arg-type]  # as they were


RECOMPUTED = rows(
    (
        chapter.must(
            "fully_shard/checkpoint-inside",
            "A unit that recomputes its activations trains like the bare module.",
            needs="device:autocast",
            rests_on="fully_shard/training",
        ),
        "inside",
    ),
    (
        chapter.must(
            "fully_shard/checkpoint-around",
            "Units that a checkpoint recomputes train like the bare module.",
            needs="device:autocast",
            rests_on="fully_shard/training",
        ),
        "around",
    ),
    (
        chapter.must(
            "fully_shard/checkpoint-below",
            "Units that lie around a checkpointed module train like the bare module.",
            needs="device:autocast",
            rests_on="fully_shard/training",
        ),
        "below",
    ),
    (
        chapter.must(
            "fully_shard/checkpoint-reentrant",
            "A unit that recomputes its activations in a reentrant backward trains like the bare "
            "module.",
            needs="device:autocast",
            rests_on="fully_shard/training",
        ),
        "reentrant",
    ),
)


@world_sizes(2)
@pytest.mark.parametrize("how", RECOMPUTED)
def test_recomputation(ranks: Ranks, how: str) -> None:
    got = ranks.run(train_recomputing, how)
    check_runs(got, train_whole(Recipe(), ranks.world_size), Recipe())


def traces_of_recomputing(me: Me, how: str) -> list[list[str]]:
    found = []
    for shard in (None, torchs):
        log = Log(me)
        run(me, Recipe(), recomputing(me, how, mesh_over(me, log.group), shard))
        found.append(log.take())
    return found


@chapter.must(
    "fully_shard/trace-of-recomputation",
    "Units that recompute their activations issue torch's collectives in torch's order: nothing is "
    "gathered for the recomputation alone.",
    source="observed, torch 2.13.0, a recorded process group",
    needs="device:autocast",
)
@world_sizes(2)
@pytest.mark.parametrize("how", ["inside", "below", "around", "reentrant"])
def test_what_recomputation_issues(ranks: Ranks, how: str) -> None:
    for got, want in ranks.run(traces_of_recomputing, how):
        assert_same_trace(got, want)


# Exceptions


class Interrupted(RuntimeError):
    """Raised by a model."""


class FailingBackward(torch.autograd.Function):
    """The identity, whose backward raises."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise Interrupted


class Failing(Block):
    """Raises in its forward or its backward, on demand."""

    fails = ""

    def forward(self, x: Tensor) -> Tensor:
        if self.fails == "forward":
            raise Interrupted
        y = super().forward(x)
        return FailingBackward.apply(y) if self.fails == "backward" else y  # type: ignore[no-untyped-call]  # torch's


def interrupted(me: Me, where: str) -> list[str]:
    """All ranks fail in the same place; the next step goes on as if nothing had been."""
    network: Any = NET.make(device=me.device)
    network.blocks[1].__class__ = Failing
    model = sharded(me, Recipe(), network)
    backward(me, model)
    model.zero_grad()
    network.blocks[1].fails = where
    raised = False
    try:
        backward(me, model, 1)
    except Interrupted:
        raised = True
    network.blocks[1].fails = ""
    model.reset_iter_state()
    model.zero_grad()
    backward(me, model)
    return unlike("raised", raised, True) + scaled(me, model, 1.0)


def in_forward(me: Me) -> list[str]:
    return interrupted(me, "forward")


def in_backward(me: Me) -> list[str]:
    return interrupted(me, "backward")


def of_an_accumulation(me: Me) -> list[str]:
    """A backward that was not synchronized, then a reset."""
    model = sharded(me, Recipe())
    model.set_requires_gradient_sync(False)
    backward(me, model, 1)
    model.reset_iter_state()
    model.set_requires_gradient_sync(True)
    backward(me, model)
    return scaled(me, model, 1.0)


INTERRUPTED = rows(
    (
        chapter.must(
            "fully_shard/forward-that-raises",
            "After an exception in a forward and reset_iter_state, the next step is right.",
            source="torch 2.13 docs, fully_shard, note on exceptions",
        ),
        in_forward,
    ),
    (
        chapter.must(
            "fully_shard/backward-that-raises",
            "After an exception in a backward and reset_iter_state, the next step is right.",
            source="torch 2.13 docs, fully_shard, note on exceptions",
        ),
        in_backward,
    ),
    (
        chapter.must(
            "fully_shard/reset-of-an-accumulation",
            "reset_iter_state drops the gradients of backwards that were not synchronized.",
            source="torch 2.13 docs, FSDPModule, reset_iter_state",
        ),
        of_an_accumulation,
    ),
)


@world_sizes(2)
@needs_method("reset_iter_state")
@pytest.mark.parametrize("fact", INTERRUPTED)
def test_exceptions(ranks: Ranks, fact: Fact) -> None:
    check_fact(ranks, fact)

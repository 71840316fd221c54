"""Recomputation of activation checkpoints under DDP: RNG, autocast, SyncBatchNorm, containers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from conformance import (
    Chapter,
    CheckFailed,
    Me,
    Ranks,
    assert_each_rank,
    assert_same_on_all_ranks,
    assert_that,
    world_sizes,
)
from conformance.oracle.data import seeded_generator
from conformance.oracle.near import Near
from conformance.spec.checkpointing.networks import (
    NON_REENTRANT,
    WHOLE,
    WIDTH,
    both_kinds,
    recomputed,
)
from conformance.spec.checkpointing.training import CAP, batch, loss_of
from conformance.spec.tolerance import assert_near
from conformance.spec.wrappers import sync_batchnorm_of

CHECKPOINT = "torch 2.13 docs, torch.utils.checkpoint"

chapter = Chapter("checkpointing", needs="device:autocast")


Gradients = dict[str, Tensor]


def gradients_of(module: nn.Module) -> Gradients:
    """A copy of every parameter's gradient."""
    grads = {}
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None
        grads[name] = parameter.grad.clone()
    return grads


def assert_near_gradients(got: list[Gradients], want: Gradients, within: float) -> None:
    """Every rank has these gradients, up to a share of the largest element of each."""
    for name, value in want.items():
        # Beside batch norm, a gradient may be zero but for rounding.
        near = Near.relative(value, within)
        near = Near(near.value, near.within + 1e-3 * within, near.dtype)
        assert_near([mine[name] for mine in got], [near] * len(got), f"gradient of {name}")


class Dropping(nn.Module):
    """A layer whose dropout is drawn anew whenever it runs, and notes what it keeps.

    kept: masks in place of random ones, for a run that repeats another one.
    """

    def __init__(self, how: str, kept: list[Tensor] | None = None) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)
        self.how = how
        self.given = kept
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = recomputed(self._part, x, how=self.how)
        return y

    def _part(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.before(x))
        if self.given:
            kept = self.given[0]
        else:
            kept = nn.functional.dropout(torch.ones_like(hidden), 0.5, training=True)
        self.kept.append(kept.detach())
        y: Tensor = self.after(hidden * kept)
        return y


def dropping(how: str, kept: list[Tensor] | None = None) -> Dropping:
    """The same parameters in every process."""
    with seeded_generator(0):
        return Dropping(how, kept).double()


def drop(me: Me, how: str) -> tuple[list[Tensor], Gradients, Tensor]:
    """What a step kept, in forward and again; its gradients; and the random numbers that follow."""
    network = dropping(how).to(me.device)
    model = me.ddp(network, **CAP)
    torch.manual_seed(100 + me.rank)
    x = batch(me.rank, 0).to(me.device).requires_grad_()
    y = model(x)
    between = torch.rand(3, device=me.device)  # other layers draw too before backward begins
    loss_of(y).backward()
    following = torch.cat([between, torch.rand(3, device=me.device)])
    return network.kept, gradients_of(network), following


@chapter.must(
    "checkpointing/dropout",
    "Dropout in a checkpoint keeps the same elements when it runs again, and each rank has its "
    "own random numbers.",
    source=f"{CHECKPOINT}, argument preserve_rng_state",
    rests_on="checkpointing/once",
)
@world_sizes(2, 3)
@both_kinds
def test_dropout_keeps_the_same_again(ranks: Ranks, how: str) -> None:
    got = ranks.run(drop, how)
    for rank, (kept, _, _) in enumerate(got):
        assert_that(len(kept) == 2, f"the part ran {len(kept)} times instead of twice", rank)
        same = torch.equal(kept[0], kept[1])
        assert_that(same, "the recomputation dropped other elements than the forward pass", rank)
    n = ranks.world_size
    assert_that(not torch.equal(got[0][0][0], got[1][0][0]), "two ranks drew the same numbers")
    want: dict[str, Tensor] = {}
    for rank, (kept, _, _) in enumerate(got):
        whole = dropping("", kept)
        (loss_of(whole(batch(rank, 0))) / n).backward()
        for name, grad in gradients_of(whole).items():
            want[name] = want[name] + grad if name in want else grad
    assert_near_gradients([grads for _, grads, _ in got], want, 1e-9)


@chapter.must(
    "checkpointing/random-numbers-go-on",
    "Random numbers after backward are the same as without checkpoints.",
    source=f"{CHECKPOINT}, argument preserve_rng_state",
    rests_on="checkpointing/dropout",
)
@world_sizes(2)
@both_kinds
def test_recomputation_uses_up_no_random_numbers(ranks: Ranks, how: str) -> None:
    want = [following for _, _, following in ranks.run(drop, "")]
    got = [following for _, _, following in ranks.run(drop, how)]
    for rank, (mine, expected) in enumerate(zip(got, want, strict=True)):
        same = torch.equal(mine, expected)
        assert_that(same, f"drew {mine.tolist()}, and without checkpoints {expected}", rank)


class Casting(nn.Module):
    """Layers that note the type in which they compute."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)
        self.how = how
        self.types: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = recomputed(self._part, x, how=self.how)
        return y

    def _part(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.before(x))
        # Here, because recomputation may stop before the end of a part.
        self.types.append(str(hidden.dtype))
        y: Tensor = self.after(hidden)
        return y


def cast(me: Me, how: str, inside: bool) -> tuple[list[str], Gradients]:
    """Types of activations, in forward and again, and gradients of a step under autocast.

    inside: backward too runs under autocast, which is not recommended.
    """
    with seeded_generator(0):
        network = Casting(how).to(me.device)
    model = me.ddp(network, **CAP)
    x = batch(me.rank, 0, size=8).float().to(me.device).requires_grad_()
    with torch.autocast(me.device.type, dtype=torch.bfloat16):
        loss = loss_of(model(x).float())
        if inside:
            loss.backward()
    if not inside:
        loss.backward()
    return network.types, gradients_of(network)


@chapter.must(
    "checkpointing/autocast",
    "A part that ran under autocast runs again in the same dtypes, wherever backward is called; "
    "the gradients have the parameters' dtypes and the values that they have without "
    "checkpoints.",
    source="pytorch#141896",
    rests_on="checkpointing/once",
)
@world_sizes(2)
@both_kinds
@pytest.mark.parametrize("inside", [False, True], ids=["", "backward too"])
def test_recomputation_computes_in_the_same_types(ranks: Ranks, how: str, inside: bool) -> None:
    want = ranks.run(cast, "", inside)
    got = ranks.run(cast, how, inside)
    for rank, (types, grads) in enumerate(got):
        what = f"activations were of {types}, want bfloat16 in forward and in recomputation"
        assert_that(types == ["torch.bfloat16"] * 2, what, rank)
        kinds = {str(grad.dtype) for grad in grads.values()}
        assert_that(kinds == {"torch.float32"}, f"gradients are of {kinds}, want float32", rank)
    assert_near_gradients([grads for _, grads in got], want[0][1], 1e-5)


class Normalising(nn.Module):
    """Batch norm in a part that is recomputed."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(WIDTH, 4), nn.Linear(4, WIDTH)
        self.norm: nn.Module = nn.BatchNorm1d(4)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = recomputed(self._part, torch.tanh(self.before(x)), how=self.how)
        return y

    def _part(self, x: Tensor) -> Tensor:
        y: Tensor = self.after(self.norm(x).square())
        return y


def normalising(how: str) -> Normalising:
    """The same parameters in every process."""
    with seeded_generator(0):
        return Normalising(how).double()


def sum_loss(y: Tensor) -> Tensor:
    """Adds up over samples, so that a loss of all is the sum of the ranks' losses."""
    weights = torch.arange(1, WIDTH + 1, dtype=y.dtype, device=y.device).sin()
    return (y * weights).sum() + (y * weights).square().sum() / 5


def normalise(
    me: Me, how: str, options: dict[str, Any], xs: list[Tensor]
) -> list[tuple[Gradients, list[Tensor]]]:
    """Gradients and running statistics of each step, batch norm being over all ranks' batches."""
    network = sync_batchnorm_of(me).convert_sync_batchnorm(normalising(how)).to(me.device)
    model = me.ddp(network, **CAP, **options)
    steps = []
    for x in xs:
        network.zero_grad()
        # DDP averages over the ranks, and a sum over all samples is wanted.
        (sum_loss(model(x.to(me.device))) * me.world_size).backward()
        buffers = [buffer.clone() for _, buffer in network.named_buffers()]
        steps.append((gradients_of(network), buffers))
    return steps


def normalise_whole(how: str, steps: list[list[Tensor]]) -> list[tuple[Gradients, list[Tensor]]]:
    """The same in one process, on all batches as one."""
    network = normalising(how)
    done = []
    for xs in steps:
        network.zero_grad()
        sum_loss(network(torch.cat(xs))).backward()
        buffers = [buffer.clone() for _, buffer in network.named_buffers()]
        done.append((gradients_of(network), buffers))
    return done


def batches_for(world_size: int) -> list[list[Tensor]]:
    """Two steps of batches, of another size on each rank."""
    return [[batch(r, i, size=2 + (r + i) % 3) for r in range(world_size)] for i in range(2)]


@chapter.must(
    "checkpointing/sync-batchnorm",
    "SyncBatchNorm in a checkpoint normalises over all ranks again when it is recomputed, and "
    "gradients are those of the whole batch in one process.",
    source="torch 2.13 docs, SyncBatchNorm and torch.utils.checkpoint",
    needs=("feature:sync_batchnorm_on_cpu", "device:autocast"),
    rests_on=("checkpointing/once", "sync_batchnorm/under-ddp"),
)
@world_sizes(2, 3)
@both_kinds
@pytest.mark.parametrize(
    "options", [{}, {"static_graph": True}, {"gradient_as_bucket_view": True}], ids=str
)
def test_batch_norm_over_all_ranks_runs_again(
    ranks: Ranks, how: str, options: dict[str, Any]
) -> None:
    n = ranks.world_size
    steps = batches_for(n)
    got = ranks.run_each(normalise, [(how, options, [xs[r] for xs in steps]) for r in range(n)])
    for i, (want, _) in enumerate(normalise_whole("", steps)):
        try:
            assert_near_gradients([mine[i][0] for mine in got], want, 1e-8)
        except CheckFailed as wrong:
            raise CheckFailed(f"step {i + 1}: {wrong}", wrong.rank) from None


@chapter.must(
    "checkpointing/sync-batchnorm-statistics",
    "Running statistics of SyncBatchNorm in a checkpoint are updated each time the part runs, as "
    "those of batch norm in one process, and are the same on all ranks.",
    source="observed, torch 2.13.0: batch norm in a checkpoint updates its statistics twice",
    needs=("feature:sync_batchnorm_on_cpu", "device:autocast"),
    rests_on=("checkpointing/sync-batchnorm", "sync_batchnorm/running-statistics"),
)
@world_sizes(2, 3)
@both_kinds
def test_statistics_of_a_part_that_runs_again(ranks: Ranks, how: str) -> None:
    """One process with the same checkpoint takes each batch in twice as well."""
    n = ranks.world_size
    steps = batches_for(n)
    got = ranks.run_each(normalise, [(how, {}, [xs[r] for xs in steps]) for r in range(n)])
    assert_same_on_all_ranks([[buffers for _, buffers in mine] for mine in got])
    for i, (_, want) in enumerate(normalise_whole(how, steps)):
        for k, name in enumerate(("running_mean", "running_var")):
            near = Near.relative(want[k], 1e-9)
            values = [mine[i][1][k] for mine in got]
            assert_near(values, [near] * n, f"{name} after step {i + 1}")
        counted, wanted = int(got[0][i][1][2]), int(want[2])
        what = f"num_batches_tracked is {counted} after step {i + 1}, want {wanted}"
        assert_that(counted == wanted, what, 0)


def compare_bits(me: Me, how: str) -> tuple[Gradients, Gradients]:
    """Gradients of a step without checkpoints, and of one with them."""
    both = []
    for kind in ("", how):
        network = WHOLE.make(kind, torch.float32).to(me.device)
        x = batch(me.rank, 0, size=7).float().to(me.device).requires_grad_()
        model = me.ddp(network, **CAP)
        loss_of(model(x)).backward()
        both.append(gradients_of(network))
    return both[0], both[1]


@chapter.should(
    "checkpointing/same-bits",
    "Where each layer runs once, gradients are the same as without checkpoints, bit for bit.",
    source=f"{CHECKPOINT}: outputs of a part that runs again are the same; observed, torch 2.13.0",
    rests_on="checkpointing/once",
)
@world_sizes(2, 3)
@both_kinds
def test_gradients_of_what_runs_again_are_the_same_bits(ranks: Ranks, how: str) -> None:
    got = ranks.run(compare_bits, how)
    want = [without for without, _ in got]
    assert_each_rank([with_checkpoints for _, with_checkpoints in got], want, what="gradients")


class Structured(nn.Module):
    """A part that takes and gives dictionaries and tuples."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        parts = recomputed(self._part, (x, 2.0), how=self.how, more={"x": x})
        y: Tensor = parts["one"] + parts["both"][1]
        return y

    def _part(self, pair: tuple[Tensor, float], more: dict[str, Tensor]) -> dict[str, Any]:
        one = torch.tanh(self.one(pair[0])) * pair[1]
        return {"one": one, "both": (one, torch.tanh(self.two(more["x"])), None)}


def structured(me: Me | None, how: str, x: Tensor) -> Gradients:
    """Gradients of a step, in one process if there is no rank."""
    with seeded_generator(0):
        network = Structured(how).double()
    if me is not None:
        network.to(me.device)
        x = x.to(me.device)
    model = network if me is None else me.ddp(network, **CAP)
    loss_of(model(x)).backward()
    return gradients_of(network)


@chapter.must(
    "checkpointing/structured",
    "A function in a non-reentrant checkpoint may take and return containers, and take keyword "
    "arguments.",
    source=f"{CHECKPOINT}: use_reentrant=False supports keyword arguments and nested structures",
    rests_on="checkpointing/every-layer",
)
@world_sizes(2)
def test_a_part_that_takes_and_gives_containers(ranks: Ranks) -> None:
    xs = [batch(rank, 0) for rank in range(2)]
    got = ranks.run_each(structured, [(NON_REENTRANT, x) for x in xs])
    alone = [structured(None, "", x) for x in xs]
    want = {name: (alone[0][name] + alone[1][name]) / 2 for name in alone[0]}
    assert_near_gradients(got, want, 1e-9)

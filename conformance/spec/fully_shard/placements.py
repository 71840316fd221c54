"""Where parameters lie: uneven shards, other dimensions, replicas, clipping, memory of a model."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import Replicate, Shard

from conformance import Chapter, Me, Ranks, assert_that, world_sizes
from conformance.spec.facts import Fact, check_fact, rows, unlike
from conformance.spec.fsdp.models import Net
from conformance.spec.fully_shard.recipes import (
    Recipe,
    check_shards,
    check_training,
    everywhere,
    local,
    mesh_of,
    mesh_over,
    part_of,
    row_numel,
    sharded,
    shards_of,
)
from conformance.spec.fully_shard.recording import replica_groups
from conformance.spec.fully_shard.settings import mean_gradients, scaled
from conformance.spec.waiting import wait_until_freed

NEEDS = ("op:all_gather_into_tensor", "op:reduce_scatter_tensor", "dtype:float64", "reduce_op:sum")
REPLICAS = (*NEEDS, "op:all_reduce")

chapter = Chapter("fully_shard", source="torch 2.13 docs, fully_shard", needs=NEEDS)

NET = Net()


# Shapes


class Shapes(nn.Module):
    """One parameter of each shape."""

    def __init__(self, shapes: tuple[tuple[int, ...], ...]) -> None:
        super().__init__()
        self.params = nn.ParameterList(
            torch.arange(1.0, 1.0 + torch.Size(s).numel(), dtype=torch.float64).view(s)
            for s in shapes
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([(p * p * x).sum() for p in self.params]).sum()


# Rows: one, fewer than ranks, as many, one more, and many; and further dimensions.
SHAPES = ((1,), (2, 1), (3, 2), (4,), (5, 2), (7, 1, 3), (11,))


def columns(param: nn.Parameter) -> Shard | None:
    """The last dimension where the ranks divide it evenly: 6 for up to three of them."""
    return Shard(-1) if param.ndim > 1 and param.size(-1) % 6 == 0 else None


def shapes_and_gradients(me: Me, shapes: Any, place: Any) -> tuple[dict[str, Tensor], Any, Any]:
    """Shards; whole parameters in the forward; and shards of gradients."""
    module = Shapes(shapes).to(me.device)
    model = me.fully_shard(module, mesh=mesh_of(me), shard_placement_fn=place)
    shards = shards_of(model)
    model.unshard()
    whole = {name: p.detach().clone() for name, p in model.named_parameters()}
    model.reshard()
    model(torch.full((), 1.0 + me.rank, dtype=torch.float64, device=me.device)).backward()
    return shards, whole, {name: local(p.grad) for name, p in model.named_parameters()}


def check_shapes(ranks: Ranks, shapes: Any, place: Any, dims: dict[str, int]) -> None:
    n = ranks.world_size
    bare = Shapes(shapes)
    got = ranks.run(shapes_and_gradients, shapes, place)
    want = {name: p.detach() for name, p in bare.named_parameters()}
    mean = (1 + n) / 2
    grads = {name: 2 * p * mean for name, p in want.items()}
    recipe = Recipe(within=1e-12)
    check_shards([shards for shards, _, _ in got], want, recipe, "shard", dims)
    for rank, (_, whole, _) in enumerate(got):
        for name, value in want.items():
            assert_that(torch.equal(whole[name], value), f"whole {name}: {whole[name]}", rank)
    check_shards([part for _, _, part in got], grads, recipe, "gradient", dims)


@chapter.must(
    "fully_shard/any-shape",
    "Parameters of any number of rows, also of fewer than there are ranks, are divided, gathered "
    "and reduced.",
    rests_on="fully_shard/shards",
)
@world_sizes(2, 3, 4, at_least=1)
def test_any_shape(ranks: Ranks) -> None:
    check_shapes(ranks, SHAPES, None, {})


@chapter.must(
    "fully_shard/no-rows",
    "A parameter without elements is divided, gathered and reduced beside others.",
    source="derived: torch 2.13, FSDPParam, pads empty shards",
    rests_on="fully_shard/shards",
)
@world_sizes(2)
def test_no_rows(ranks: Ranks) -> None:
    check_shapes(ranks, ((0, 3), (2,)), None, {})


@chapter.must(
    "fully_shard/other-dimensions",
    "With shard_placement_fn a parameter is divided along the dimension that it returns, and along "
    "the first for None.",
    source="torch 2.13 docs, fully_shard, shard_placement_fn",
)
@world_sizes(2, 3)
def test_other_dimensions(ranks: Ranks) -> None:
    shapes = ((5, 6), (4,), (2, 3, 6), (3, 2))
    check_shapes(ranks, shapes, columns, {"params.0": 1, "params.2": 2})


# Replicas


def on_two_dimensions(me: Me) -> list[str]:
    model = sharded(me, Recipe(replicas=2))
    placed = {str(p.placements) for p in model.parameters()}
    want = {str((Replicate(), Shard(0)))}
    whole = dict(NET.make().named_parameters())
    found = unlike("placements", placed, want)
    for name, got in shards_of(model).items():
        found += unlike(name, got.cpu(), part_of(whole[name].detach(), 2, me.rank % 2))
    return found


def in_two_groups(me: Me) -> list[str]:
    with replica_groups(me, 2) as groups:
        model = sharded(me, Recipe(units="root"), mesh=mesh_over(me, *groups, sizes=(2, 2)))
        NET.loss(model, me.rank, 0, me.device).backward()
        between, inside = ([i.operation for i in group.take()] for group in groups)
        found = unlike("inside", inside, ["all_gather_into_tensor", "reduce_scatter_tensor"])
        return found + unlike("between", between, ["all_reduce"])


def size_between(me: Me) -> list[str]:
    with replica_groups(me, 2) as groups:
        model = sharded(me, Recipe(units="root"), mesh=mesh_over(me, *groups, sizes=(2, 2)))
        NET.loss(model, me.rank, 0, me.device).backward()
        numels = [issued.numel for issued in groups[0].take()]
        return unlike("elements between replicas", numels, [row_numel(NET.make().parameters(), 2)])


def added_later(me: Me) -> list[str]:
    """Three backwards, of which the last one alone adds up replicas."""
    with replica_groups(me, 2) as groups:
        model = sharded(me, Recipe(units="root"), mesh=mesh_over(me, *groups, sizes=(2, 2)))
        seen = []
        for number in (0, 1, 2):
            model.set_requires_all_reduce(number == 2)
            NET.loss(model, me.rank, number, me.device).backward()
            seen.append(len(groups[0].take()))
        found = unlike("all-reduces", seen, [0, 0, 1])
        return found or unlike_mean(me, model, 1.0, numbers=(0, 1, 2))


def unlike_mean(
    me: Me, model: Any, factor: float, plus: float = 0.0, numbers: tuple[int, ...] = (0,)
) -> list[str]:
    """This rank's parts of gradients, in two replicas, are these times the mean ones, and more."""
    want = mean_gradients(me.world_size, numbers)
    for name, param in model.named_parameters():
        part = factor * part_of(want[name], 2, me.rank % 2) + plus
        if not torch.allclose(local(param.grad).cpu(), part, rtol=1e-7, atol=1e-10):
            return [f"gradient of {name} is not {factor} times the mean of all ranks, plus {plus}"]
    return []


def divided_by_eight(me: Me) -> list[str]:
    model = sharded(me, Recipe(replicas=2))
    everywhere(model, "set_gradient_divide_factor", 8.0)
    NET.loss(model, me.rank, 0, me.device).backward()
    return unlike_mean(me, model, me.world_size / 8)


def hooked_after_the_sum(me: Me) -> list[str]:
    """What a hook adds before the sum over replicas would be added twice."""
    model = sharded(me, Recipe(replicas=2))
    everywhere(model, "set_gradient_divide_factor", 1.0)
    everywhere(model, "set_all_reduce_hook", lambda reduced: reduced.add_(1))
    NET.loss(model, me.rank, 0, me.device).backward()
    return unlike_mean(me, model, me.world_size, plus=1.0)


def added_above(me: Me) -> list[str]:
    """The root's gradients alone are not added up."""
    with replica_groups(me, 2) as groups:
        model = sharded(me, Recipe(), mesh=mesh_over(me, *groups, sizes=(2, 2)))
        model.set_requires_all_reduce(False, recurse=False)
        NET.loss(model, me.rank, 0, me.device).backward()
        return unlike("all-reduces of two blocks and a root", len(groups[0].take()), 2)


OVER_REPLICAS = rows(
    (
        chapter.must(
            "fully_shard/replica-placements",
            "Over a mesh of replicas by shards, parameters are replicated over the first dimension "
            "and divided over the second.",
        ),
        on_two_dimensions,
    ),
    (
        chapter.must(
            "fully_shard/replica-groups",
            "Over a mesh of replicas, parameters are gathered and gradients scattered among the "
            "ranks that share them, and all-reduced among those with the same shard.",
            needs=REPLICAS,
        ),
        in_two_groups,
    ),
    (
        chapter.must(
            "fully_shard/replica-sizes",
            "Of each unit, one padded row of shards is all-reduced among replicas.",
            needs=REPLICAS,
        ),
        size_between,
    ),
    (
        chapter.must(
            "fully_shard/all-reduce-later",
            "After set_requires_all_reduce(False) gradients are scattered and not all-reduced; the "
            "next all-reduce adds up all of them.",
            source="torch 2.13 docs, FSDPModule, set_requires_all_reduce",
            needs=REPLICAS,
        ),
        added_later,
    ),
    (
        chapter.must(
            "fully_shard/all-reduce-of-one-unit",
            "With recurse=False, set_requires_all_reduce is about the module's own unit alone.",
            source="torch 2.13 docs, FSDPModule, set_requires_all_reduce",
            needs=REPLICAS,
        ),
        added_above,
    ),
    (
        chapter.must(
            "fully_shard/divide-factor-over-replicas",
            "Over a mesh of replicas, set_gradient_divide_factor sets by what the sum over all "
            "ranks is divided.",
            source="torch 2.13, _get_gradient_divide_factors",
            needs=REPLICAS,
        ),
        divided_by_eight,
    ),
    (
        chapter.must(
            "fully_shard/hook-over-replicas",
            "Over a mesh of replicas, the hook of set_all_reduce_hook gets gradients that are "
            "added up over the replicas.",
            source="torch 2.13, foreach_reduce",
            needs=REPLICAS,
            rests_on="fully_shard/divide-factor-over-replicas",
        ),
        hooked_after_the_sum,
    ),
)


@world_sizes(4)
@pytest.mark.parametrize("fact", OVER_REPLICAS)
def test_replicas(ranks: Ranks, fact: Fact) -> None:
    check_fact(ranks, fact)


TRAINED = rows(
    (
        chapter.must(
            "fully_shard/replicas",
            "Over a mesh of replicas, training is the bare module's on all ranks' batches.",
            needs=REPLICAS,
            rests_on="fully_shard/training",
        ),
        Recipe(replicas=2),
    ),
    (
        chapter.must(
            "fully_shard/replicas-of-one-rank",
            "Over a mesh whose parts are single ranks, whole replicas train like the bare module.",
            needs=REPLICAS,
            rests_on="fully_shard/training",
        ),
        Recipe(replicas=4),
    ),
    (
        chapter.must(
            "fully_shard/accumulation-over-replicas",
            "Accumulation over a mesh of replicas gives the bare module's steps.",
            needs=REPLICAS,
            rests_on="fully_shard/training",
        ),
        Recipe(replicas=2, backwards=(False, True)),
    ),
)


@world_sizes(4)
@pytest.mark.parametrize("recipe", TRAINED)
def test_training_over_replicas(ranks: Ranks, recipe: Recipe) -> None:
    check_training(ranks, recipe)


# Norms


@dataclass(frozen=True, slots=True)
class Clip:
    norm_type: float
    foreach: bool


def clipped(me: Me, clip: Clip) -> tuple[Tensor, dict[str, Tensor]]:
    model = sharded(me, Recipe())
    NET.loss(model, me.rank, 0, me.device).backward()
    norm: Any = nn.utils.clip_grad_norm_(
        model.parameters(), 0.1, norm_type=clip.norm_type, foreach=clip.foreach
    )
    whole = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    return whole, {name: local(p.grad) for name, p in model.named_parameters()}


@chapter.must(
    "fully_shard/gradient-norm",
    "clip_grad_norm_ of sharded parameters gives the norm of all gradients, once it is made whole.",
    source="torch 2.13 docs, clip_grad_norm_, on DTensors",
    needs=REPLICAS,
)
@chapter.must(
    "fully_shard/clipped-gradients",
    "clip_grad_norm_ scales each shard's gradient as it scales the bare module's.",
    source="torch 2.13 docs, clip_grad_norm_, on DTensors",
    needs=REPLICAS,
)
@world_sizes(2, 3)
@pytest.mark.parametrize("clip", [Clip(2.0, True), Clip(2.0, False), Clip(1.0, True)])
def test_clipping(ranks: Ranks, clip: Clip) -> None:
    bare = NET.make()
    for name, gradient in mean_gradients(ranks.world_size).items():
        bare.get_parameter(name).grad = gradient
    norm = nn.utils.clip_grad_norm_(bare.parameters(), 0.1, norm_type=clip.norm_type)
    got = ranks.run(clipped, clip)
    for rank, (mine, _) in enumerate(got):
        close = torch.allclose(mine, norm, rtol=1e-9)
        assert_that(close, f"norm: got {mine.item()}, want {norm.item()}", rank)
    wanted = {name: p.grad for name, p in bare.named_parameters()}
    check_shards([grads for _, grads in got], wanted, Recipe(), "clipped")


# The life of a model


def freed(me: Me) -> list[str]:
    model = sharded(me, Recipe())
    NET.loss(model, me.rank, 0, me.device).backward()
    seen = [weakref.ref(module) for module in (model, model.blocks[0])]
    del model
    wait_until_freed(*seen)
    return unlike("is still there", [ref() is not None for ref in seen], [False, False])


def bytes_of_shards(me: Me) -> list[str]:
    """Storage of shards alone: what was cut off is not held by views of it."""
    model = sharded(me, Recipe())
    params: Any = list(model.parameters())
    held = sum(p.to_local().untyped_storage().nbytes() for p in params)
    return unlike("bytes", held <= 8 * row_numel(NET.make().parameters(), me.world_size), True)


def two_models(me: Me) -> list[str]:
    """Their steps are interleaved."""
    models = [sharded(me, Recipe()) for _ in range(2)]
    losses = [NET.loss(model, me.rank, 0, me.device) for model in models]
    for loss in losses:
        loss.backward()
    return [found for model in models for found in scaled(me, model, 1.0)]


def part_of_a_model(me: Me) -> list[str]:
    """Of a bare root, whose blocks alone are sharded: each block is a root of its own."""
    network: Any = NET.make(device=me.device)
    for block in network.blocks:
        me.fully_shard(block, mesh=mesh_of(me))
    NET.loss(network, me.rank, 0, me.device).backward()
    found = []
    for name, whole in mean_gradients(me.world_size).items():
        if name.startswith("blocks"):
            got = local(network.get_parameter(name).grad).cpu()
            want = part_of(whole, me.world_size, me.rank)
            if not torch.allclose(got, want, rtol=1e-7, atol=1e-10):
                found.append(f"gradient of {name}: got {got}, want {want}")
    kinds = isinstance(network, FSDPModule), isinstance(network.blocks[0], FSDPModule)
    return found[:1] + unlike("root and block are sharded", kinds, (False, True))


LIVES = rows(
    (
        chapter.must(
            "fully_shard/freed-with-the-model",
            "A model that is dropped after a step is freed.",
            source="derived: fully_shard holds nothing of a module but on the module",
        ),
        freed,
    ),
    (
        chapter.must(
            "fully_shard/memory-of-shards",
            "Between steps the memory of parameters is that of this rank's padded shards.",
            source="torch 2.13 docs, fully_shard: parameters are sharded to save memory",
        ),
        bytes_of_shards,
    ),
    (
        chapter.must(
            "fully_shard/two-models",
            "Steps of two sharded models may be interleaved.",
        ),
        two_models,
    ),
    (
        chapter.must(
            "fully_shard/several-roots",
            "Sharded modules in a bare model are roots of their own, and their gradients are mean "
            "ones.",
        ),
        part_of_a_model,
    ),
)


@world_sizes(2)
@pytest.mark.parametrize("fact", LIVES)
def test_lives_of_models(ranks: Ranks, fact: Fact) -> None:
    check_fact(ranks, fact)

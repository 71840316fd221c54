"""Sizes of FSDP's sharded parameters, gradients and optimizer state between iterations."""

from __future__ import annotations

from dataclasses import dataclass

from conformance import (
    Chapter,
    Me,
    Ranks,
    assert_that,
    covers,
    world_sizes,
)
from conformance.spec.fsdp.models import Net, Network, units_of
from conformance.spec.fsdp.training_runs import Recipe, both_kinds

DOCS = "torch 2.13 docs, FullyShardedDataParallel"

chapter = Chapter("fsdp")


def _check(got: object, want: object, what: str, rank: int) -> None:
    assert_that(got == want, f"{what}: got {got}, want {want}", rank)


@dataclass(frozen=True, slots=True)
class Held:
    """Elements that a rank holds: of parameters, their storages, gradients, optimizer state."""

    params: int
    room: int
    grads: int
    state: int


def held(me: Me, recipe: Recipe) -> Held:
    """After a backward and a step with momentum."""
    model = recipe.wrapped(me)
    optimizer = recipe.optimizer_of(model)
    recipe.net.loss(model, me.rank, 0, me.device).backward()
    params = list(model.parameters())
    grads = sum(p.grad.numel() for p in params if p.grad is not None)
    optimizer.step()
    state = sum(s["momentum_buffer"].numel() for s in optimizer.state.values())
    rooms = {
        p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() // p.element_size()
        for p in params
        if p.numel()
    }
    return Held(sum(p.numel() for p in params), sum(rooms.values()), grads, state)


@chapter.must(
    "fsdp/sharded-parameters",
    "Between iterations a rank's parameters are one chunk of each unit, and their storages have "
    "no room for more.",
    source=DOCS,
)
@chapter.must(
    "fsdp/sharded-gradients",
    "After a backward, gradients have the sizes of the rank's chunks.",
    source=DOCS,
)
@chapter.must(
    "fsdp/sharded-optimizer-state",
    "The optimizer's state has the sizes of the rank's chunks.",
    source=DOCS,
)
@world_sizes(2, 3, 4, at_least=2)
def test_sizes_between_iterations(ranks: Ranks) -> None:
    chunks = sum(unit.chunk for unit in units_of(Net(), ranks.world_size))
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP"):
        for rank, mine in enumerate(ranks.run(held, Recipe(strategy=strategy))):
            _check(mine, Held(chunks, chunks, chunks, chunks), "elements held", rank)


@covers("fsdp/sharded-parameters", "fsdp/sharded-gradients", "fsdp/sharded-optimizer-state")
@world_sizes(2, 3, 4, at_least=2)
def test_sizes_of_original_parameters(ranks: Ranks) -> None:
    """A rank's parts of all parameters, without what lies between them."""
    chunks = sum(unit.chunk for unit in units_of(Net(), ranks.world_size, orig=True))
    got = ranks.run(held, Recipe(orig=True))
    for rank, mine in enumerate(got):
        assert_that(mine.room <= chunks, f"room for {mine.room}, a chunk has {chunks}", rank)
        same = mine.params == mine.grads == mine.state
        assert_that(same, f"parameters, gradients and state differ: {mine}", rank)
    whole = sum(p.numel() for p in Net().make().parameters())
    total = sum(mine.params for mine in got)
    assert_that(total == whole, f"all ranks hold {total} elements, the model has {whole}")


def gradients_under_no_sync(me: Me, recipe: Recipe) -> tuple[int, bool]:
    """Elements of all gradients of this rank, and whether they are those of its own batch."""
    model = recipe.wrapped(me)
    with model.no_sync():
        recipe.net.loss(model, me.rank, 3, me.device).backward()
    bare: Network = recipe.net.make(device=me.device)
    recipe.net.loss(bare, me.rank, 3, me.device).backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    own = sum(float(p.grad.sum()) for p in bare.parameters() if p.grad is not None)
    total = sum(float(grad.sum()) for grad in grads)
    return sum(grad.numel() for grad in grads), abs(total - own) < 1e-9


@chapter.must(
    "fsdp/whole-gradients-under-no-sync",
    "Under no_sync, a rank keeps the full gradients of its own batch.",
    source=f"{DOCS}, no_sync: needs more memory",
)
@world_sizes(2, 3)
@both_kinds
def test_gradients_under_no_sync(ranks: Ranks, orig: bool) -> None:
    whole = sum(p.numel() for p in Net().make().parameters())
    for rank, (numel, own) in enumerate(ranks.run(gradients_under_no_sync, Recipe(orig=orig))):
        _check(numel, whole, "elements of gradients", rank)
        assert_that(own, "the gradients are not those of the rank's own batch", rank)

"""unshard and reshard: parameters made whole, and sharded again, by the user."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from conformance import Chapter, Me, Ranks, world_sizes
from conformance.spec.facts import Fact, check_fact, rows, unlike
from conformance.spec.fsdp.models import Net
from conformance.spec.fully_shard.companions import register_forward_method
from conformance.spec.fully_shard.recipes import Recipe, local, mesh_of, sharded
from conformance.spec.fully_shard.recording import logged

NEEDS = ("op:all_gather_into_tensor", "op:reduce_scatter_tensor", "dtype:float64", "reduce_op:sum")

chapter = Chapter("fully_shard", source="torch 2.13 docs, FSDPModule, unshard", needs=NEEDS)

NET = Net()


def wanted(name: str) -> Tensor:
    """A parameter of the bare network."""
    return NET.make().get_parameter(name).detach()


def whole_by_hand(me: Me) -> list[str]:
    model = sharded(me, Recipe())
    model.blocks[1].unshard()
    weight = model.blocks[1].up.weight
    found = unlike("is whole", isinstance(weight, DTensor), False)
    return found or unlike("value", weight.detach().cpu(), wanted("blocks.1.up.weight"))


def only_this_one(me: Me) -> list[str]:
    model = sharded(me, Recipe())
    model.unshard()
    shown = isinstance(model.head.weight, DTensor), isinstance(model.blocks[0].up.weight, DTensor)
    return unlike("head and block are sharded", shown, (False, True))


def sharded_again(me: Me) -> list[str]:
    model = sharded(me, Recipe())
    shard = model.blocks[1].up.weight
    model.blocks[1].unshard()
    whole = model.blocks[1].up.weight
    model.blocks[1].reshard()
    found = unlike("the shard again", model.blocks[1].up.weight is shard, True)
    return found + unlike("bytes of the whole", whole.untyped_storage().nbytes(), 0)


def asynchronous(me: Me) -> list[str]:
    model = sharded(me, Recipe())
    handles = [block.unshard(async_op=True) for block in model.blocks]
    for handle in handles:
        handle.wait()
    weight = model.blocks[1].up.weight
    found = unlike("is whole", isinstance(weight, DTensor), False)
    return found or unlike("value", weight.detach().cpu(), wanted("blocks.1.up.weight"))


def waited_for_by_the_forward(me: Me) -> list[str]:
    model, log = logged(me, Recipe())
    model.blocks[0].unshard(async_op=True)
    model.blocks[1].unshard(async_op=True)
    loss = NET.loss(model, me.rank, 0, me.device).detach().cpu()
    want = NET.loss(NET.make(), me.rank, 0, torch.device("cpu")).detach()
    gathers = [line for line in log.take() if line.startswith("gather")]
    found = unlike("gathers", len(gathers), 3)
    return found + unlike("loss", torch.allclose(loss, want, rtol=1e-9), True)


def waited_for_twice(me: Me) -> list[str]:
    model = sharded(me, Recipe())
    handle = model.blocks[1].unshard(async_op=True)
    handle.wait()
    model.blocks[1].reshard()
    handle.wait()
    return unlike("is sharded", isinstance(model.blocks[1].up.weight, DTensor), True)


def once(me: Me) -> list[str]:
    model, log = logged(me, Recipe())
    model.blocks[0].unshard()
    model.blocks[0].unshard()
    return unlike("gathers", len(log.take()), 1)


def nothing_to_reshard(me: Me) -> list[str]:
    model, log = logged(me, Recipe())
    before = [local(p) for p in model.parameters()]
    for module in (model, *model.blocks):
        module.reshard()
    found = unlike("values", [local(p) for p in model.parameters()], before)
    return found + unlike("issued", log.take(), [])


def dropped_changes(me: Me) -> list[str]:
    """Whole parameters are a copy: what is written to them is gone when they are gathered next."""
    model = sharded(me, Recipe())
    for _ in range(2):
        model.blocks[0].unshard()
        seen = model.blocks[0].up.weight.detach().cpu().clone()
        with torch.no_grad():
            model.blocks[0].up.weight.zero_()
        model.blocks[0].reshard()
    return unlike("gathered again", seen, wanted("blocks.0.up.weight"))


def kept_changes(me: Me) -> list[str]:
    model = sharded(me, Recipe())
    with torch.no_grad():
        for param in model.parameters():
            local_part: Any = param.to_local()
            local_part.mul_(2)
    model.blocks[0].unshard()
    want = 2 * wanted("blocks.0.up.weight")
    return unlike("gathered", model.blocks[0].up.weight.detach().cpu(), want)


BY_HAND = rows(
    (
        chapter.must(
            "fully_shard/unshard",
            "After unshard, a module shows whole parameters.",
        ),
        whole_by_hand,
    ),
    (
        chapter.must(
            "fully_shard/unshard-alone",
            "unshard gathers the parameters of the module's own unit, and of no unit below it.",
        ),
        only_this_one,
    ),
    (
        chapter.must(
            "fully_shard/reshard",
            "After reshard, a module shows its shards again, and the memory of the whole is free.",
            source="torch 2.13 docs, FSDPModule, reshard",
        ),
        sharded_again,
    ),
    (
        chapter.must(
            "fully_shard/unshard-async",
            "unshard with async_op returns a handle; parameters are whole once its wait has "
            "returned.",
        ),
        asynchronous,
    ),
    (
        chapter.must(
            "fully_shard/forward-waits",
            "A forward waits for the unshard with async_op that went before, and does not gather "
            "again.",
        ),
        waited_for_by_the_forward,
    ),
    (
        chapter.must(
            "fully_shard/second-wait",
            "A second wait on a handle of unshard does nothing.",
            source="torch 2.13, _UnshardHandleImpl",
        ),
        waited_for_twice,
    ),
    (
        chapter.must(
            "fully_shard/unshard-once",
            "What is whole already is not gathered again by unshard.",
            source="torch 2.13, FSDPParamGroup.unshard",
        ),
        once,
    ),
    (
        chapter.must(
            "fully_shard/reshard-of-shards",
            "reshard of what is sharded already does nothing.",
            source="torch 2.13, FSDPParamGroup.reshard",
        ),
        nothing_to_reshard,
    ),
    (
        chapter.must(
            "fully_shard/whole-is-a-copy",
            "What is written to whole parameters does not reach the shards.",
            source="torch 2.13 docs, fully_shard: the registered parameters must be the sharded "
            "ones to be modified",
        ),
        dropped_changes,
    ),
    (
        chapter.must(
            "fully_shard/shards-are-the-parameters",
            "What is written to shards is in the whole parameters that are gathered next.",
            source="torch 2.13 docs, fully_shard: the registered parameters must be the sharded "
            "ones to be modified",
        ),
        kept_changes,
    ),
)


@world_sizes(2)
@pytest.mark.parametrize("fact", BY_HAND)
def test_by_hand(ranks: Ranks, fact: Fact) -> None:
    check_fact(ranks, fact)


class Encoder(nn.Module):
    """Has another method than forward that uses its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.shown: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.encode(x)

    def encode(self, x: Tensor) -> Tensor:
        """Encoded."""
        self.shown.append(isinstance(self.layer.weight, DTensor))
        result: Tensor = self.layer(x)
        return result


def other_method(me: Me) -> list[str]:
    torch.manual_seed(3)
    module = Encoder().double().to(me.device)
    module.requires_grad_(True)
    want = module.encode(torch.ones(1, 3, dtype=torch.float64, device=me.device)).detach().cpu()
    model = me.fully_shard(module, mesh=mesh_of(me), reshard_after_forward=True)
    register_forward_method(me, model, "encode")
    module.shown.clear()
    x = torch.full((1, 3), 1.0 + me.rank, dtype=torch.float64, device=me.device)
    if me.rank == 0:
        x = torch.ones_like(x)
    y = model.encode(x)
    found = unlike("sharded in the method", module.shown, [False])
    found += unlike("sharded after it", isinstance(model.layer.weight, DTensor), True)
    if me.rank == 0:
        found += unlike("result", torch.allclose(y.detach().cpu(), want), True)
    y.sum().backward()
    mean = sum(1.0 + rank for rank in range(me.world_size)) / me.world_size
    gradient = local(model.layer.weight.grad)
    return found + unlike("gradient", gradient.cpu(), torch.full_like(gradient.cpu(), mean))


def not_sharded(me: Me) -> list[str]:
    module = Encoder()
    register_forward_method(me, module, "encode")
    found = unlike("the method", "encode" in vars(module), False)
    return found + unlike("its result", tuple(module.encode(torch.ones(1, 3)).shape), (1, 2))


METHODS = rows(
    (
        chapter.must(
            "fully_shard/forward-method",
            "A method that register_fsdp_forward_method has named counts as a forward: parameters "
            "are whole in it, sharded after it, and gradients are reduced.",
            source="torch 2.13 docs, register_fsdp_forward_method",
        ),
        other_method,
    ),
    (
        chapter.must(
            "fully_shard/forward-method-unsharded",
            "register_fsdp_forward_method leaves a module alone that is not sharded.",
            source="torch 2.13 docs, register_fsdp_forward_method",
        ),
        not_sharded,
    ),
)


@world_sizes(2)
@pytest.mark.parametrize("fact", METHODS)
def test_methods(ranks: Ranks, fact: Fact) -> None:
    check_fact(ranks, fact)

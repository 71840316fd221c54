"""fully_shard itself: what becomes of a module, of its parameters and of its class."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from conformance import Chapter, Me, Ranks, world_sizes
from conformance.harness.traces import record
from conformance.spec.additions import silently_local
from conformance.spec.facts import Fact, check_fact, rows, unlike
from conformance.spec.fsdp.models import Net
from conformance.spec.fully_shard.recipes import (
    Recipe,
    mesh_of,
    mesh_over,
    part_of,
    row_numel,
    sharded,
    shards_of,
)

NEEDS = ("op:all_gather_into_tensor", "op:reduce_scatter_tensor", "dtype:float64", "reduce_op:sum")

chapter = Chapter("fully_shard", source="torch 2.13 docs, fully_shard", needs=NEEDS)

NET = Net()


def in_place(me: Me) -> list[str]:
    module = nn.Linear(3, 2, device=me.device)
    result = me.fully_shard(module, mesh=mesh_of(me))
    kinds = isinstance(module, nn.Linear), isinstance(module, FSDPModule)
    return unlike("same module", result is module, True) + unlike(
        "its classes", kinds, (True, True)
    )


def of_one_class(me: Me) -> list[str]:
    both = [me.fully_shard(nn.Linear(2, 2, device=me.device), mesh=mesh_of(me)) for _ in range(2)]
    found = unlike("name of the class", type(both[0]).__name__, "FSDPLinear")
    return found + unlike("same class", type(both[0]) is type(both[1]), True)


def of_a_list(me: Me) -> list[str]:
    modules = [nn.Linear(2, 2, device=me.device) for _ in range(2)]
    result = me.fully_shard(modules, mesh=mesh_of(me))
    kinds = [isinstance(module, FSDPModule) for module in modules]
    return unlike("same list", result is modules, True) + unlike("its classes", kinds, [True, True])


def names(me: Me) -> list[str]:
    network = NET.make(device=me.device)
    want = [name for name, _ in network.named_parameters()]
    model = sharded(me, Recipe(), network)
    return unlike("names", [name for name, _ in model.named_parameters()], want)


def distributed_tensors(me: Me) -> list[str]:
    network = NET.make(device=me.device)
    shapes = [tuple(p.shape) for p in network.parameters()]
    mesh = mesh_of(me)
    params: Any = list(sharded(me, Recipe(), network, mesh).parameters())
    kinds = [isinstance(p, DTensor) and isinstance(p, nn.Parameter) for p in params]
    found = unlike("are DTensors and parameters", kinds, [True] * len(params))
    if found:
        return found
    found = unlike("global shapes", [tuple(p.shape) for p in params], shapes)
    found += unlike("placed", [str(p.placements) for p in params], [str((Shard(0),))] * len(params))
    return found + unlike(
        "on the mesh", [p.device_mesh == mesh for p in params], [True] * len(params)
    )


def shards(me: Me) -> list[str]:
    whole = dict(NET.make().named_parameters())
    got = shards_of(sharded(me, Recipe()))
    found = []
    for name, param in whole.items():
        want = part_of(param.detach(), me.world_size, me.rank)
        found += unlike(f"shard of {name}", got[name].cpu(), want)
    return found


def requires_grad(me: Me) -> list[str]:
    network = Net(frozen="parts").make(device=me.device)
    want = {name: p.requires_grad for name, p in network.named_parameters()}
    model = sharded(me, Recipe(), network)
    return unlike("requires_grad", {n: p.requires_grad for n, p in model.named_parameters()}, want)


def buffers(me: Me) -> list[str]:
    model = sharded(me, Recipe())
    kinds = type(model.scale) is Tensor, model.scale.item()
    return unlike("the buffer", kinds, (True, 1.5))


def tied(me: Me) -> list[str]:
    model = sharded(me, Recipe(net=Net(tied=True)))
    found = unlike("one parameter", model.head.weight is model.embedding.weight, True)
    names = [name for name, _ in model.named_parameters()]
    return found + unlike("named once", "head.weight" in names, False)


def no_communication(me: Me) -> list[str]:
    group = record()
    sharded(me, Recipe(), mesh=mesh_over(me, group))
    return unlike("issued", list(map(str, group.take())), [])


def own_values(me: Me) -> list[str]:
    module = nn.Linear(2, me.world_size, bias=False, device=me.device)
    with torch.no_grad():
        module.weight.fill_(me.rank)
    model = me.fully_shard(module, mesh=mesh_of(me))
    want = torch.full((1, 2), float(me.rank))
    return unlike("values", shards_of(model)["weight"].cpu(), want)


def default_mesh(me: Me) -> list[str]:
    weight: Any = me.fully_shard(nn.Linear(2, 2, device=me.device)).weight
    mesh = weight.device_mesh
    return unlike("ranks of the mesh", mesh.mesh.tolist(), list(range(me.world_size)))


def slices(me: Me) -> list[str]:
    layers = [nn.Linear(2, 2, device=me.device) for _ in range(3)]
    model = me.fully_shard(nn.Sequential(*layers), mesh=mesh_of(me))
    return unlike("class of a slice", type(model[:2]).__name__, "Sequential")


def ignored(me: Me) -> list[str]:
    network = NET.make(device=me.device)
    weight, value = network.head.weight, network.head.weight.detach().clone()
    model = sharded(me, Recipe(kwargs={"ignored_params": {weight}}), network)
    NET.loss(model, me.rank, 0, me.device).backward()
    bare = NET.make()
    NET.loss(bare, me.rank, 0, torch.device("cpu")).backward()
    found = unlike("same tensor", model.head.weight is weight, True)
    if found:
        return found
    found = unlike("value", weight.detach(), value)
    got, want = weight.grad, bare.head.weight.grad
    assert got is not None
    assert want is not None
    close = torch.allclose(got.cpu(), want)
    return found + unlike("gradient is this rank's own", close, True)


def optimizer_state(me: Me) -> list[str]:
    model = sharded(me, Recipe())
    optimizer = torch.optim.Adam(model.parameters())
    NET.loss(model, me.rank, 0, me.device).backward()
    optimizer.step()
    shapes = [tuple(local_state(optimizer, p).shape) for p in model.parameters()]
    whole = NET.make().parameters()
    want = [tuple(part_of(p, me.world_size, me.rank).shape) for p in whole]
    return unlike("shapes of the optimizer's state", shapes, want)


def local_state(optimizer: torch.optim.Optimizer, param: Tensor) -> Tensor:
    state: Any = optimizer.state[param]["exp_avg"]
    mine: Tensor = state.to_local() if isinstance(state, DTensor) else state
    return mine


def earlier_calls(me: Me) -> list[str]:
    """A layer of its own, a block around it, and the rest."""
    group = record()
    network: Any = Net(blocks=1).make(device=me.device)
    mesh = mesh_over(me, group)
    layer, block = network.blocks[0].up, network.blocks[0]
    numels = [row_numel(module.parameters(), me.world_size) for module in (layer, block)]
    for module in (layer, block, network):
        me.fully_shard(module, mesh=mesh)
    with torch.no_grad():
        NET.loss(network, me.rank, 0, me.device)
    gathered = [issued.numel // (me.world_size + 1) for issued in group.take()]
    return unlike("gathered after the root", gathered[1:], [numels[1] - numels[0], numels[0]])


FACTS = rows(
    (
        chapter.must(
            "fully_shard/in-place",
            "fully_shard changes the module in place and returns it; it is of its own class, and "
            "an FSDPModule.",
        ),
        in_place,
    ),
    (
        chapter.must(
            "fully_shard/class-name",
            "The class of a sharded module is named FSDP and the former name, and is the same for "
            "all modules of that class.",
            source="torch 2.13, _apply_to_module",
        ),
        of_one_class,
    ),
    (
        chapter.must(
            "fully_shard/list",
            "Of a list of modules, all become sharded modules, and the list is returned.",
        ),
        of_a_list,
    ),
    (
        chapter.must(
            "fully_shard/names",
            "Parameters keep their names and their order.",
        ),
        names,
    ),
    (
        chapter.must(
            "fully_shard/dtensors",
            "Each parameter becomes a DTensor of its former shape, on the mesh, sharded along its "
            "first dimension.",
        ),
        distributed_tensors,
    ),
    (
        chapter.must(
            "fully_shard/shards",
            "Each rank has its chunk of each parameter, as torch.chunk divides it: the last ones "
            "may be smaller, or empty.",
            rests_on="fully_shard/dtensors",
        ),
        shards,
    ),
    (
        chapter.must(
            "fully_shard/requires-grad",
            "A shard requires gradients if the parameter did.",
        ),
        requires_grad,
    ),
    (
        chapter.must(
            "fully_shard/buffers",
            "Buffers are not sharded.",
            source="torch 2.13, _get_managed_states",
        ),
        buffers,
    ),
    (
        chapter.must(
            "fully_shard/tied-names",
            "A parameter with two names in one unit is one parameter afterwards.",
            source="torch 2.13, _get_managed_states",
        ),
        tied,
    ),
    (
        chapter.must(
            "fully_shard/silent-construction",
            "Sharding a module issues no collective.",
            source="observed, torch 2.13.0: chunks are cut locally",
        ),
        no_communication,
    ),
    (
        chapter.must(
            "fully_shard/own-values",
            "Each rank's shard is cut from the values that the rank has: they are not exchanged.",
            source="observed, torch 2.13.0: chunks are cut locally",
        ),
        own_values,
    ),
    (
        chapter.must(
            "fully_shard/default-mesh",
            "Without a mesh, parameters are divided among all ranks.",
        ),
        default_mesh,
    ),
    (
        chapter.must(
            "fully_shard/slices",
            "A slice of a sharded container is of the container's former class.",
            source="torch 2.13, FSDPModule.__new__",
        ),
        slices,
    ),
    (
        chapter.must(
            "fully_shard/ignored-params",
            "Parameters in ignored_params stay what they are, and keep their rank's gradients.",
        ),
        ignored,
    ),
    (
        chapter.must(
            "fully_shard/optimizer-state",
            "An optimizer of the sharded parameters has state for this rank's shards alone.",
        ),
        optimizer_state,
    ),
    (
        chapter.must(
            "fully_shard/earlier-calls",
            "A call makes one unit of all parameters that no earlier call on a module below has "
            "taken: they are gathered together.",
        ),
        earlier_calls,
    ),
)


@world_sizes(2, 3)
@pytest.mark.parametrize("fact", FACTS)
def test_what_becomes_of_a_module(ranks: Ranks, fact: Fact) -> None:
    check_fact(ranks, fact)


def added_to_sharded(me: Me) -> list[str]:
    return silently_local(me, lambda module: me.fully_shard(module, mesh=mesh_of(me)))


@chapter.should(
    "fully_shard/added-layer",
    "A layer that is added to a module after fully_shard was applied is taken in, or a warning "
    "names its parameters, or the first forward is refused; its gradients never silently stay "
    "local.",
    source="derived: a mistake that would go unnoticed",
)
@world_sizes(2)
def test_a_layer_that_was_added(ranks: Ranks) -> None:
    check_fact(ranks, added_to_sharded)

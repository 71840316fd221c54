"""State dicts as DTensors: saved, loaded, made whole, resumed by other ranks; conversions; meta."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor

from conformance import Chapter, Me, Ranks, world_sizes
from conformance.spec.facts import Fact, check_fact, rows, unlike
from conformance.spec.fsdp.models import Net
from conformance.spec.fully_shard.recipes import (
    Recipe,
    backward_passes,
    check_shards,
    local,
    sharded,
    shards_of,
    train_whole,
)

NEEDS = ("op:all_gather_into_tensor", "op:reduce_scatter_tensor", "dtype:float64", "reduce_op:sum")
FULL = (*NEEDS, "op:broadcast")

chapter = Chapter("fully_shard", source="torch 2.13 docs, fully_shard", needs=NEEDS)

NET = Net()


def trained(me: Me, recipe: Recipe | None = None) -> tuple[Any, Any]:
    """A model after a step, and its optimizer."""
    recipe = recipe or Recipe(optimizer="adam")
    model = sharded(me, recipe)
    optimizer = recipe.optimizer_of(model)
    backward_passes(me, recipe, model, 0)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def keys(me: Me) -> list[str]:
    model, _ = trained(me)
    return unlike("keys", list(model.state_dict()), list(NET.make().state_dict()))


def distributed_values(me: Me) -> list[str]:
    model, _ = trained(me)
    state = model.state_dict()
    kinds = {name: isinstance(x, DTensor) for name, x in state.items()}
    want = {name: name != "scale" for name in state}
    found = unlike("are DTensors", kinds, want)
    parts = {name: local(x) for name, x in state.items() if name != "scale"}
    return found + unlike("values", parts, shards_of(model))


def after_a_forward(me: Me) -> list[str]:
    """The root keeps its whole parameters after a forward; a state dict has shards even so."""
    model = sharded(me, Recipe())
    with torch.no_grad():
        NET.loss(model, me.rank, 0, me.device)
    state = model.state_dict()
    return unlike("head is a DTensor", isinstance(state["head.weight"], DTensor), True)


def full_values(me: Me) -> list[str]:
    model, _ = trained(me, Recipe(optimizer="plain"))
    whole = {name: p.full_tensor().detach().cpu() for name, p in model.named_parameters()}
    bare = train_whole(Recipe(optimizer="plain", steps=1), me.world_size)[0].params
    close = {n: torch.allclose(whole[n], want, rtol=1e-9, atol=1e-12) for n, want in bare.items()}
    return unlike("full_tensor is the bare module's", close, dict.fromkeys(bare, True))


def loaded(me: Me) -> list[str]:
    model, _ = trained(me)
    other = sharded(me, Recipe(), NET.make(1, device=me.device))
    other.load_state_dict(model.state_dict())
    return unlike("loaded shards", shards_of(other), shards_of(model))


def loaded_when_whole(me: Me) -> list[str]:
    """A forward without a backward has left the root whole."""
    model, _ = trained(me)
    other = sharded(me, Recipe(), NET.make(1, device=me.device))
    with torch.no_grad():
        NET.loss(other, me.rank, 0, me.device)
    other.load_state_dict(model.state_dict())
    losses = [NET.loss(m, me.rank, 3, me.device).detach() for m in (other, model)]
    return unlike("loss", *losses) + unlike("shards", shards_of(other), shards_of(model))


def assigned(me: Me) -> list[str]:
    """As a model that was made on the meta device loads its values."""
    model, _ = trained(me)
    with torch.device("meta"):
        network = NET.make()
    other = sharded(me, Recipe(), network)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    other.load_state_dict(state, assign=True)
    losses = [NET.loss(m, me.rank, 3, me.device).detach() for m in (other, model)]
    return unlike("loss", *losses) + unlike("shards", shards_of(other), shards_of(model))


def distributed_by_hand(me: Me) -> list[str]:
    """Each value of a whole state dict is distributed as the parameter is."""
    whole = NET.make(1).state_dict()
    model = sharded(me, Recipe())
    state: Any = model.state_dict()
    parts = {
        name: distribute_tensor(whole[name], x.device_mesh, x.placements, src_data_rank=None)
        if isinstance(x, DTensor)
        else whole[name]
        for name, x in state.items()
    }
    model.load_state_dict(parts, assign=True)
    other = sharded(me, Recipe(), NET.make(1, device=me.device))
    return unlike("shards", shards_of(model), shards_of(other))


def loaded_optimizer(me: Me) -> list[str]:
    model, optimizer = trained(me)
    other = sharded(me, Recipe())
    other.load_state_dict(model.state_dict())
    resumed = torch.optim.Adam(other.parameters(), lr=0.02)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for one, stepper in ((model, optimizer), (other, resumed)):
        backward_passes(me, Recipe(), one, 1)
        stepper.step()
    return unlike("shards after the next step", shards_of(other), shards_of(model))


def in_a_file(me: Me) -> list[str]:
    """Each rank saves its local parts, and loads them."""
    model, _ = trained(me)
    file = io.BytesIO()
    torch.save({name: local(x) for name, x in model.state_dict().items()}, file)
    file.seek(0)
    other = sharded(me, Recipe())
    with torch.no_grad():
        for name, part in torch.load(file).items():
            if name != "scale":
                other.get_parameter(name).to_local().copy_(part)
    return unlike("shards", shards_of(other), shards_of(model))


def whole_on_the_first_rank(me: Me) -> list[str]:
    model, _ = trained(me)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state: Any = get_model_state_dict(model, options=options)
    if me.rank > 0:
        return unlike("keys on other ranks", list(state), [])
    shapes = {name: tuple(x.shape) for name, x in state.items()}
    want = {name: tuple(x.shape) for name, x in NET.make().state_dict().items()}
    plain = {type(x) for x in state.values()} == {Tensor}
    return unlike("shapes", shapes, want) + unlike("plain tensors", plain, True)


def broadcast_from_the_first_rank(me: Me) -> list[str]:
    model = sharded(me, Recipe())
    state = NET.make(1).state_dict() if me.rank == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, state, options=options)
    other = sharded(me, Recipe(), NET.make(1, device=me.device))
    return unlike("shards", shards_of(model), shards_of(other))


def from_meta(me: Me) -> list[str]:
    with torch.device("meta"):
        network = NET.make()
    model = sharded(me, Recipe(), network)
    model.to_empty(device=me.device)
    bare = NET.make(1)
    shards = shards_of(sharded(me, Recipe(), NET.make(1, device=me.device)))
    with torch.no_grad():
        model.scale.copy_(bare.scale)
        for name, param in model.named_parameters():
            param.to_local().copy_(shards[name])
    loss = NET.loss(model, me.rank, 0, me.device).detach().cpu()
    want = NET.loss(bare, me.rank, 0, torch.device("cpu")).detach()
    return unlike("loss is the bare module's", torch.allclose(loss, want, rtol=1e-9), True)


def converted(me: Me) -> list[str]:
    """Once before the first forward, and once after a backward."""
    model = sharded(me, Recipe(), NET.make(device=me.device).float())
    model.double()
    found = unlike("whole weight", whole_weight(model), weight_of(NET.make().float().double()))
    NET.loss(model, me.rank, 0, me.device).backward()
    model.bfloat16().double()
    want = weight_of(NET.make().float().bfloat16().double())
    return found + unlike("whole weight, converted later", whole_weight(model), want)


def whole_weight(model: Any) -> Tensor:
    model.blocks[0].unshard()
    weight = weight_of(model).clone()
    model.blocks[0].reshard()
    return weight


def weight_of(model: Any) -> Tensor:
    weight: Tensor = model.get_parameter("blocks.0.up.weight").detach().cpu()
    return weight


STATES = rows(
    (
        chapter.must(
            "fully_shard/state-dict-keys",
            "A state dict has the keys of the bare module's.",
        ),
        keys,
    ),
    (
        chapter.must(
            "fully_shard/state-dict-values",
            "The values of a state dict are this rank's shards, as DTensors; buffers are whole.",
        ),
        distributed_values,
    ),
    (
        chapter.must(
            "fully_shard/state-dict-after-a-forward",
            "A state dict has shards of a unit whose parameters a forward has left whole, too.",
            source="torch 2.13, FSDPParamGroup._register_state_dict_hooks",
        ),
        after_a_forward,
    ),
    (
        chapter.must(
            "fully_shard/full-tensor",
            "full_tensor of a parameter is the whole parameter of the bare module.",
        ),
        full_values,
    ),
    (
        chapter.must(
            "fully_shard/load-state-dict",
            "A model loads the state dict of another sharded one.",
        ),
        loaded,
    ),
    (
        chapter.must(
            "fully_shard/loaded-when-whole",
            "What is loaded when a forward has left parameters whole counts in the next forward.",
        ),
        loaded_when_whole,
    ),
    (
        chapter.must(
            "fully_shard/assigned-state-dict",
            "A model on the meta device takes over a state dict with assign=True.",
        ),
        assigned,
    ),
    (
        chapter.must(
            "fully_shard/distributed-state-dict",
            "A model takes over whole values that distribute_tensor has divided as its parameters "
            "are.",
        ),
        distributed_by_hand,
    ),
    (
        chapter.must(
            "fully_shard/optimizer-state-dict",
            "An optimizer of another sharded model goes on with the state dict of the first.",
        ),
        loaded_optimizer,
    ),
    (
        chapter.must(
            "fully_shard/local-state",
            "Local parts that a rank saves can be copied into the shards of another model.",
        ),
        in_a_file,
    ),
    (
        chapter.must(
            "fully_shard/full-state-dict",
            "get_model_state_dict with full_state_dict and cpu_offload gives the first rank whole "
            "tensors, and nothing to the others.",
            source="torch 2.13 docs, StateDictOptions",
        ),
        whole_on_the_first_rank,
    ),
    (
        chapter.must(
            "fully_shard/broadcast-state-dict",
            "set_model_state_dict with broadcast_from_rank0 gives each rank its shards of what the "
            "first rank has.",
            source="torch 2.13 docs, StateDictOptions",
            needs=FULL,
        ),
        broadcast_from_the_first_rank,
    ),
    (
        chapter.must(
            "fully_shard/from-meta",
            "A model that is sharded on the meta device is made real by to_empty, and trains with "
            "the values that its shards are given.",
        ),
        from_meta,
    ),
    (
        chapter.must(
            "fully_shard/converted",
            "Shards that a conversion of the module, such as double(), has changed are gathered as "
            "they are then, also if the module was converted after a backward.",
            source="torch 2.13, FSDPModule._apply",
        ),
        converted,
    ),
)


@world_sizes(2, 3)
@pytest.mark.parametrize("fact", STATES)
def test_states(ranks: Ranks, fact: Fact) -> None:
    check_fact(ranks, fact)


def train_on_two_then_on_all(me: Me) -> dict[str, Tensor]:
    """A step on the first two ranks, then one on all; the last rank joins in for it."""
    recipe = Recipe(optimizer="adam", steps=2)
    two = DeviceMesh(me.device.type, [0, 1])
    options = StateDictOptions(full_state_dict=True)
    state: list[Any] = [None, None]
    if me.rank < 2:
        model = sharded(me, recipe, mesh=two)
        optimizer = recipe.optimizer_of(model)
        backward_passes(me, recipe, model, 0)
        optimizer.step()
        state = [
            get_model_state_dict(model, options=options),
            get_optimizer_state_dict(model, optimizer, options=options),
        ]
    dist.broadcast_object_list(state, 0)
    model = sharded(me, recipe)
    optimizer = recipe.optimizer_of(model)
    set_model_state_dict(model, state[0], options=options)
    set_optimizer_state_dict(model, optimizer, state[1], options=options)
    backward_passes(me, recipe, model, 1)
    optimizer.step()
    return shards_of(model)


def bare_resumed() -> dict[str, Tensor]:
    recipe = Recipe(optimizer="adam")
    model = NET.make()
    optimizer = recipe.optimizer_of(model)
    for step, count in ((0, 2), (1, 3)):
        for rank in range(count):
            number = recipe.numbers(step)[0][0]
            (NET.loss(model, rank, number, torch.device("cpu")) / count).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}


@chapter.must(
    "fully_shard/resumed-by-more-ranks",
    "Model and optimizer of two ranks, saved in full, go on with three ranks as one process does.",
    source="torch 2.13 docs, StateDictOptions, full_state_dict",
    needs=FULL,
    rests_on="fully_shard/training",
)
@world_sizes(3)
def test_resuming_with_more_ranks(ranks: Ranks) -> None:
    got = ranks.run(train_on_two_then_on_all)
    check_shards(got, bare_resumed(), Recipe(within=1e-6), "params")

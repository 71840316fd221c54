"""FSDP's sharded state dicts: few rows, meshes of one and two dimensions, hybrid sharding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    ShardedOptimStateDictConfig,
)

from conformance import (
    Chapter,
    Me,
    Ranks,
    assert_same_on_all_ranks,
    covers,
    world_sizes,
)
from conformance.spec.fsdp.models import Net
from conformance.spec.fsdp.state_dict_kinds import (
    FULL,
    SHARDED,
    adam,
    bare_training,
    by_name,
    check_rows,
    loadable,
    rows_of,
    saved,
    tensors,
)
from conformance.spec.fsdp.training_runs import (
    HYBRIDS,
    Recipe,
    both_kinds,
    check_tensors,
    full_parameters,
    halves,
    train_step,
    trained,
)
from conformance.torch_private import forget_meshes

DOCS = "torch 2.13 docs, FullyShardedDataParallel"

chapter = Chapter("fsdp")


@dataclass(frozen=True, slots=True)
class Resumed:
    """What a rank has saved, and what has come of it.

    rows: of each sharded entry. optim: the full optimizer state. before, after: parameters of the
    model that was saved and of the one that has loaded it, a step later.
    """

    rows: dict[str, Tensor]
    optim: dict[str, Tensor]
    before: dict[str, Tensor]
    after: dict[str, Tensor]


def resume(me: Me, recipe: Recipe, mesh: tuple[int, ...], hybrid: bool) -> Resumed:
    """Save a trained model in shards, and load it into another one.

    mesh: its shape; none if empty. hybrid: two groups of ranks, as `halves` makes them.
    """
    kwargs: dict[str, Any] = {}
    if mesh:
        kwargs["device_mesh"] = init_device_mesh(me.device.type, mesh)
    if hybrid:
        kwargs["process_group"] = halves(me)
    model, optimizer = trained(me, recipe, **kwargs)
    other, other_optimizer = trained(me, recipe, seed=9, **kwargs)
    cls = type(model)
    with cls.state_dict_type(model, SHARDED), cls.state_dict_type(other, SHARDED):
        state = model.state_dict()
        rows = rows_of(state)
        other.load_state_dict(state)
    # A config of its own: with a mesh it is marked.
    config = ShardedOptimStateDictConfig(offload_to_cpu=False)
    state = saved(model, optimizer, SHARDED, config)
    other_optimizer.load_state_dict(loadable(other, other_optimizer, state, SHARDED, config))
    full = FullOptimStateDictConfig(offload_to_cpu=False)
    optim = tensors(saved(model, optimizer, FULL, full))
    for one, its in ((model, optimizer), (other, other_optimizer)):
        train_step(me, recipe, one, its, 50)
    if mesh:
        del state
        forget_meshes()
    return Resumed(rows, optim, full_parameters(model), full_parameters(other))


def check_resumed(
    ranks: Ranks, recipe: Recipe, members: int, mesh: tuple[int, ...] = (), hybrid: bool = False
) -> None:
    """Every `members` ranks together hold everything; what was loaded trains as what was saved."""
    bare, optimizer = bare_training(recipe, ranks.world_size)
    want = {name: param.detach() for name, param in bare.named_parameters()}
    got = ranks.run(resume, recipe, mesh, hybrid)
    for first in range(0, ranks.world_size, members):
        check_rows([one.rows for one in got[first : first + members]], want, within=1e-6)
    check_tensors([one.optim for one in got], [by_name(bare, optimizer)] * len(got), within=1e-6)
    for one in got:
        check_tensors([one.after], [one.before], within=0)


@chapter.must(
    "fsdp/fewer-rows-than-ranks",
    "Sharded state dicts of model and optimizer include parameters with fewer rows than ranks, "
    "and can be loaded.",
    source="torch 2.13, _create_chunk_sharded_tensor: ranks without a chunk",
    rests_on="fsdp/sharded-state-dict",
)
@world_sizes(3, 4)
@both_kinds
def test_few_rows(ranks: Ranks, orig: bool) -> None:
    net = Net(width=2, hidden=3, blocks=1, vocabulary=3)
    check_resumed(ranks, adam(net=net, orig=orig), ranks.world_size)


@chapter.must(
    "fsdp/sharded-state-dict-on-mesh",
    "With a device_mesh, sharded state dicts of model and optimizer hold DTensors, split by rows "
    "over the mesh's last dimension, and can be loaded.",
    source="torch 2.13, _create_chunk_dtensor",
)
@world_sizes(2, 3)
@both_kinds
def test_shards_on_a_mesh(ranks: Ranks, orig: bool) -> None:
    check_resumed(ranks, adam(orig=orig), ranks.world_size, (ranks.world_size,))


@covers("fsdp/sharded-state-dict-on-mesh")
@world_sizes(4)
@both_kinds
def test_shards_on_a_mesh_of_two_dimensions(ranks: Ranks, orig: bool) -> None:
    for strategy in HYBRIDS:
        check_resumed(ranks, adam(orig=orig, strategy=strategy), 2, (2, 2))


@chapter.must(
    "fsdp/sharded-state-dict-hybrid",
    "With hybrid sharding each group's ranks together hold the whole of a sharded state dict, "
    "and can load it.",
    source=f"{DOCS}, state_dict_type",
    rests_on="fsdp/sharded-state-dict",
)
@chapter.must(
    "fsdp/full-optimizer-state-hybrid",
    "With hybrid sharding every rank's full optimizer state dict is the bare module's.",
    source=f"{DOCS}, optim_state_dict",
)
@world_sizes(4)
@both_kinds
def test_shards_of_replicas(ranks: Ranks, orig: bool) -> None:
    for strategy in HYBRIDS:
        check_resumed(ranks, adam(orig=orig, strategy=strategy), 2, hybrid=True)


def sharded_keys(me: Me, recipe: Recipe) -> tuple[list[str], list[str]]:
    """Keys of a sharded state dict, and those that the model misses when it loads it."""
    model = recipe.wrapped(me)
    with type(model).state_dict_type(model, SHARDED):
        state = model.state_dict()
        keys = sorted(state)
        return keys, model.load_state_dict(state, strict=False).missing_keys


@chapter.must(
    "fsdp/tied-sharded-state-dict",
    "Both names of a tied weight are in a sharded state dict, which can be loaded.",
    source="the bare module's state dict",
    rests_on="fsdp/tied-state-dict",
)
@world_sizes(2)
@both_kinds
def test_names_of_tied_weights(ranks: Ranks, orig: bool) -> None:
    recipe = Recipe(net=Net(tied=True, blocks=1), orig=orig)
    want = sorted(recipe.net.make().state_dict())
    got = ranks.run(sharded_keys, recipe)
    assert_same_on_all_ranks(got, (want, []), what="keys, and missing ones")

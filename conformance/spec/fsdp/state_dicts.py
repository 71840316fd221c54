"""FSDP model state dicts (full, sharded, local): contents, loading, exchange, state_dict_type."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullStateDictConfig,
    MixedPrecision,
    ShardedStateDictConfig,
    StateDictType,
)
from torch.nn.parallel import DistributedDataParallel

from conformance import Chapter, Me, Ranks, assert_same_on_all_ranks, assert_that, world_sizes
from conformance.spec.fsdp.models import Net
from conformance.spec.fsdp.state_dict_kinds import FULL, LOCAL, SHARDED
from conformance.spec.fsdp.training_runs import (
    STRATEGIES,
    Recipe,
    both,
    both_kinds,
    check_tensors,
    full_parameters,
    halves,
    train_step,
    train_whole,
    trained,
)
from conformance.spec.raising import assert_raised
from conformance.target import resolve

DOCS = "torch 2.13 docs, FullyShardedDataParallel"

chapter = Chapter("fsdp")


State = dict[str, Any]


def bare_state(recipe: Recipe, world_size: int) -> dict[str, Tensor]:
    """The state dict that the bare module has after the same training."""
    params = train_whole(recipe, world_size)[0].params
    network = recipe.net.make()
    network.load_state_dict(params, strict=False)
    return dict(network.state_dict())


def full_state(me: Me, recipe: Recipe, config: Any = None, hybrid: bool = False) -> State:
    """The full state dict after training, and one more step after it was made."""
    kwargs: dict[str, Any] = {"process_group": halves(me)} if hybrid else {}
    model, optimizer = trained(me, recipe, **kwargs)
    with type(model).state_dict_type(model, FULL, config):
        state = dict(model.state_dict())
    train_step(me, recipe, model, optimizer, 90)
    return state


@chapter.must(
    "fsdp/full-state-dict",
    "A full state dict has the bare module's keys, in its order, with its shapes, dtypes and "
    "values, on every rank.",
    source=f"{DOCS}, state_dict_type; FULL_STATE_DICT is the default",
)
@chapter.must(
    "fsdp/full-state-dict-is-kept",
    "A full state dict does not change when training continues.",
    source="torch 2.13, _full_post_state_dict_hook clones what is sharded",
)
@world_sizes(1, 2, 3)
@both_kinds
def test_full_state_dicts(ranks: Ranks, orig: bool) -> None:
    for strategy in STRATEGIES:
        recipe = Recipe(strategy=strategy, orig=orig)
        # A replicated parameter is not copied, neither by torch.
        if strategy == "NO_SHARD" or ranks.world_size == 1:
            recipe = Recipe(strategy=strategy, orig=orig, steps=0)
            got = [dict(state) for state in ranks.run(untrained_state, recipe)]
        else:
            got = ranks.run(full_state, recipe)
        want = bare_state(recipe, ranks.world_size)
        check_tensors(got, [want] * ranks.world_size)


def untrained_state(me: Me, recipe: Recipe) -> State:
    """The full state dict of a model as it is made."""
    return dict(recipe.wrapped(me).state_dict())


@chapter.must(
    "fsdp/full-state-dict-hybrid",
    "With hybrid sharding, too, every rank's full state dict is the bare module's.",
    source=f"{DOCS}, state_dict_type",
)
@world_sizes(4)
def test_full_state_dicts_of_hybrid_sharding(ranks: Ranks) -> None:
    recipe = Recipe(strategy="HYBRID_SHARD")
    got = ranks.run(full_state, recipe, None, True)
    check_tensors(got, [bare_state(recipe, 4)] * 4)


@chapter.must(
    "fsdp/full-state-dict-on-rank-0",
    "With rank0_only the other ranks get an empty state dict, and rank 0 gets all entries.",
    source=f"{DOCS}, FullStateDictConfig",
)
@world_sizes(2, 3)
@both_kinds
def test_full_state_dicts_on_rank_0(ranks: Ranks, orig: bool) -> None:
    recipe = Recipe(orig=orig)
    first, *others = ranks.run(full_state, recipe, FullStateDictConfig(rank0_only=True))
    check_tensors([first], [bare_state(recipe, ranks.world_size)])
    assert_same_on_all_ranks([list(state) for state in others], [], what="other ranks' keys")


def devices(me: Me, config: Any) -> list[str]:
    """Where the tensors of a full state dict are."""
    model = Recipe().wrapped(me)
    with type(model).state_dict_type(model, FULL, config):
        return sorted({value.device.type for value in model.state_dict().values()})


@chapter.must(
    "fsdp/full-state-dict-on-cpu",
    "With offload_to_cpu the tensors of a full state dict are on the CPU.",
    source=f"{DOCS}, FullStateDictConfig",
)
@world_sizes(2)
def test_full_state_dicts_on_the_cpu(ranks: Ranks) -> None:
    config = FullStateDictConfig(offload_to_cpu=True)
    assert_same_on_all_ranks(ranks.run(devices, config), ["cpu"], what="devices")
    recipe = Recipe()
    check_tensors(ranks.run(full_state, recipe, config), [bare_state(recipe, 2)] * 2)


@chapter.must(
    "fsdp/tied-state-dict",
    "Both names of a tied weight are in a full state dict, with the same value.",
    source="the bare module's state dict",
)
@world_sizes(2, 3)
@both_kinds
def test_tied_weights(ranks: Ranks, orig: bool) -> None:
    recipe = Recipe(net=Net(tied=True, blocks=1), orig=orig)
    got = ranks.run(full_state, recipe)
    check_tensors(got, [bare_state(recipe, ranks.world_size)] * ranks.world_size)


def load_and_train(me: Me, recipe: Recipe, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A model that begins with other values loads these and trains."""
    model = recipe.wrapped(me, seed=9)
    model.load_state_dict({name: value.to(me.device) for name, value in state.items()})
    optimizer = recipe.optimizer_of(model)
    for step in range(recipe.steps):
        train_step(me, recipe, model, optimizer, step)
    return full_parameters(model)


@chapter.must(
    "fsdp/loads-the-bare-state-dict",
    "A full state dict of the bare module can be loaded, and training continues from it.",
    source=f"{DOCS}, state_dict_type",
)
@world_sizes(2, 3)
@both_kinds
def test_loading_from_the_bare_module(ranks: Ranks, orig: bool) -> None:
    for strategy in STRATEGIES:
        recipe = Recipe(strategy=strategy, orig=orig, steps=2)
        got = ranks.run(load_and_train, recipe, dict(recipe.net.make().state_dict()))
        want = train_whole(recipe, ranks.world_size)
        check_tensors(got, [run.params for run in want])


def exchange_with_ddp(me: Me, recipe: Recipe) -> tuple[State, State]:
    """A state dict that went from DDP to FSDP and into another DDP, before and after."""
    wrapper = resolve(me.target.ddp) if me.target.ddp else DistributedDataParallel
    first = wrapper(recipe.net.make(3, me.device))
    model = recipe.wrapped(me, seed=4)
    model.load_state_dict(first.module.state_dict())
    second = wrapper(recipe.net.make(5, me.device))
    second.module.load_state_dict(model.state_dict())
    return dict(first.module.state_dict()), dict(second.module.state_dict())


@chapter.must(
    "fsdp/exchanges-with-ddp",
    "State dicts can be exchanged between DistributedDataParallel and FSDP in both directions.",
    source="derived: both have the bare module's",
    rests_on="fsdp/full-state-dict",
    needs="dtype:float64",
)
@world_sizes(2)
@both_kinds
def test_exchange_with_ddp(ranks: Ranks, orig: bool) -> None:
    for before, after in ranks.run(exchange_with_ddp, Recipe(orig=orig)):
        check_tensors([after], [before], within=0)


# Shards


def sharded_parts(me: Me, recipe: Recipe) -> dict[str, list[tuple[int, Tensor]]]:
    """Name -> this rank's parts of the entry: where it begins in the first dimension, values."""
    model, _ = trained(me, recipe)
    parts: dict[str, list[tuple[int, Tensor]]] = {}
    with type(model).state_dict_type(model, SHARDED):
        for name, value in model.state_dict().items():
            if type(value) is Tensor:
                parts[name] = [(-1, value)]
            else:
                shards = value.local_shards()
                parts[name] = [(s.metadata.shard_offsets[0], s.tensor.clone()) for s in shards]
    return parts


@chapter.must(
    "fsdp/sharded-state-dict",
    "A sharded state dict has the bare module's keys; the ranks' parts of an entry together are "
    "the whole, and no rank holds more than its part.",
    source=f"{DOCS}, SHARDED_STATE_DICT",
)
@world_sizes(2, 3)
@both_kinds
def test_sharded_state_dicts(ranks: Ranks, orig: bool) -> None:
    recipe = Recipe(orig=orig)
    got = ranks.run(sharded_parts, recipe)
    want = bare_state(recipe, ranks.world_size)
    for rank, parts in enumerate(got):
        assert_that(list(parts) == list(want), f"keys {list(parts)}, want {list(want)}", rank)
    for name, whole in want.items():
        parts = sorted(
            ((at, part) for mine in got for at, part in mine[name]), key=lambda pair: pair[0]
        )
        if parts[0][0] < 0:
            check_tensors([{name: parts[0][1]}], [{name: whole}])
            assert_that(name == "scale", f"{name} is a plain tensor")
        else:
            rows = torch.cat([part for _, part in parts])
            check_tensors([{name: rows}], [{name: whole}])


def round_trip(me: Me, recipe: Recipe, kind: StateDictType, config: Any) -> tuple[State, State]:
    """Parameters of a trained model, and of another one that loaded its state dict."""
    model, _ = trained(me, recipe)
    other = recipe.wrapped(me, seed=9)
    with (
        type(model).state_dict_type(model, kind, config),
        type(other).state_dict_type(other, kind, config),
    ):
        other.load_state_dict(model.state_dict())
    return full_parameters(model), full_parameters(other)


@chapter.must(
    "fsdp/sharded-state-dict-loads",
    "A sharded state dict can be loaded into another instance, which then has its values.",
    source=f"{DOCS}, SHARDED_STATE_DICT",
)
@world_sizes(2, 3)
@both_kinds
def test_sharded_round_trips(ranks: Ranks, orig: bool) -> None:
    for strategy in STRATEGIES[:2]:
        for config in (None, ShardedStateDictConfig(offload_to_cpu=True)):
            recipe = Recipe(strategy=strategy, orig=orig, steps=1)
            for before, after in ranks.run(round_trip, recipe, SHARDED, config):
                check_tensors([after], [before], within=0)


def local_entries(me: Me, recipe: Recipe) -> dict[str, int]:
    """Key -> elements that this rank holds, of the entries of flat parameters."""
    model = recipe.wrapped(me)
    with type(model).state_dict_type(model, LOCAL):
        return {
            name: sum(shard.tensor.numel() for shard in value.local_shards())
            for name, value in model.state_dict().items()
            if type(value) is not Tensor
        }


@chapter.must(
    "fsdp/local-state-dict",
    "A local state dict holds this rank's chunk of each flat parameter, and can be loaded.",
    source="torch 2.13, LOCAL_STATE_DICT",
)
@world_sizes(2, 3)
def test_local_state_dicts(ranks: Ranks) -> None:
    check_local(ranks, Recipe(steps=1))


@chapter.must(
    "fsdp/local-state-dict-original",
    "With use_orig_params=True, too, a local state dict can be loaded.",
    source="derived; torch 2.13 calls the flat parameters unexpected keys",
)
@world_sizes(2, 3)
def test_local_state_dicts_of_original_parameters(ranks: Ranks) -> None:
    check_local(ranks, Recipe(orig=True, steps=1))


def check_local(ranks: Ranks, recipe: Recipe) -> None:
    """A chunk of each flat parameter, which another instance can load."""
    flat = ["_flat_param", "blocks.0._flat_param", "blocks.1._flat_param"]
    whole = sum(p.numel() for p in recipe.net.make().parameters())
    got = ranks.run(local_entries, recipe)
    for rank, entries in enumerate(got):
        assert_that(sorted(entries) == flat, f"entries {sorted(entries)}", rank)
    total = sum(sum(entries.values()) for entries in got)
    padding = ranks.world_size * len(flat) * 12  # between and behind the parameters of a unit
    assert_that(whole <= total <= whole + padding, f"{total} elements, the model has {whole}")
    for before, after in ranks.run(round_trip, recipe, LOCAL, None):
        check_tensors([after], [before], within=0)


def exchange(me: Me, recipe: Recipe, kind: StateDictType) -> list[tuple[State, State]]:
    """Parameters of a trained model and of one that loaded its state dict: torch's to the target's
    and the target's to torch's."""
    found = []
    for first, second in (both(me), both(me)[::-1]):
        model, _ = trained(me, recipe, first)
        other = recipe.wrapped(me, second, seed=9)
        with type(model).state_dict_type(model, kind), type(other).state_dict_type(other, kind):
            other.load_state_dict(model.state_dict())
        found.append((full_parameters(model), full_parameters(other)))
    return found


def check_exchange(ranks: Ranks, kind: StateDictType, kinds: Sequence[bool]) -> None:
    for orig in kinds:
        for pairs in ranks.run(exchange, Recipe(orig=orig, steps=1), kind):
            for before, after in pairs:
                check_tensors([after], [before], within=0)


@chapter.must(
    "fsdp/exchanges-full-with-torch",
    "Full state dicts of model and optimizer can be exchanged between torch's FSDP and the "
    "target's in both directions.",
    source="derived: one format",
    rests_on="fsdp/full-state-dict",
)
@world_sizes(2, 3)
def test_full_exchange_with_torch(ranks: Ranks) -> None:
    check_exchange(ranks, FULL, (False, True))


@chapter.must(
    "fsdp/exchanges-sharded-with-torch",
    "Sharded state dicts of model and optimizer can be exchanged between torch's FSDP and the "
    "target's in both directions.",
    source="derived: one format",
    rests_on="fsdp/sharded-state-dict",
)
@world_sizes(2, 3)
def test_sharded_exchange_with_torch(ranks: Ranks) -> None:
    check_exchange(ranks, SHARDED, (False, True))


@chapter.must(
    "fsdp/exchanges-local-with-torch",
    "Local state dicts can be exchanged between torch's FSDP and the target's in both directions.",
    source="derived: one layout",
    rests_on="fsdp/local-state-dict",
)
@world_sizes(2, 3)
def test_local_exchange_with_torch(ranks: Ranks) -> None:
    check_exchange(ranks, LOCAL, (False,))


def local_on_a_mesh(me: Me) -> None:
    model = Recipe().wrapped(me, device_mesh=init_device_mesh(me.device.type, (me.world_size,)))
    type(model).set_state_dict_type(model, LOCAL)
    model.state_dict()


@chapter.must(
    "fsdp/mesh-has-no-local-state-dict",
    "With a device_mesh, a local state dict of a sharded instance is refused with RuntimeError "
    "'DeviceMesh is not compatible'.",
    source="observed, torch 2.13.0",
)
@world_sizes(2)
def test_no_local_state_dict_on_a_mesh(ranks: Ranks) -> None:
    assert_raised(
        ranks.outcomes(local_on_a_mesh), RuntimeError, match="DeviceMesh is not compatible"
    )


def inside_another(me: Me) -> tuple[list[str], bool]:
    """Keys of a module that holds an instance; whether another one like it can load them."""
    outer, other = (
        nn.Sequential(Recipe().wrapped(me, seed=seed), nn.Linear(1, 1)) for seed in (0, 3)
    )
    state = outer.state_dict()
    other.load_state_dict(state)
    same = torch.equal(other.state_dict()["0.head.weight"], state["0.head.weight"])
    return list(state), same


@chapter.must(
    "fsdp/outer-module",
    "A module that holds an FSDP instance has its entries under the instance's name.",
    source="torch.nn.Module.state_dict",
)
@world_sizes(2)
def test_an_outer_module(ranks: Ranks) -> None:
    want = [f"0.{name}" for name in Net().make().state_dict()] + ["1.weight", "1.bias"]
    for rank, (keys, same) in enumerate(ranks.run(inside_another)):
        assert_that(keys == want, f"keys {keys}, want {want}", rank)
        assert_that(same, "loading left another value", rank)


# Buffers and ignored modules


def low_precision_buffers(me: Me) -> tuple[list[str], list[str]]:
    """Dtypes of buffers after a forward, and in state dicts."""
    net = Net(dtype="float32")
    precision = MixedPrecision(buffer_dtype=torch.bfloat16)
    model = Recipe(net).wrapped(me, mixed_precision=precision)
    net.loss(model, me.rank, 0, me.device).backward()
    in_model = [str(buffer.dtype) for buffer in model.buffers()]
    saved = []
    for kind in (FULL, SHARDED):
        with type(model).state_dict_type(model, kind):
            saved.append(str(model.state_dict()["scale"].dtype))
    return in_model, saved


@chapter.must(
    "fsdp/buffers-in-full-precision",
    "Buffers are saved in the dtype that they had before mixed precision.",
    source="torch 2.13, _common_unshard_pre_state_dict_hook",
)
@world_sizes(2)
def test_buffers_in_low_precision(ranks: Ranks) -> None:
    want = (["torch.bfloat16"], ["torch.float32"] * 2)
    assert_same_on_all_ranks(ranks.run(low_precision_buffers), want, what="dtypes")


def ignored_entries(me: Me) -> list[str]:
    """Types of an ignored block's entries in full and sharded state dicts."""
    network = Net().make(device=me.device)
    model = me.fsdp(network, ignored_states=list(network.blocks[1].parameters()))
    found = set()
    for kind in (FULL, SHARDED):
        with type(model).state_dict_type(model, kind):
            state = model.state_dict()
            found |= {type(v).__name__ for n, v in state.items() if n.startswith("blocks.1")}
    return sorted(found)


@chapter.should(
    "fsdp/ignored-in-state-dict",
    "Entries of ignored modules are plain tensors in every kind of state dict.",
    source="torch 2.13, ignored modules are left alone",
)
@world_sizes(2)
def test_ignored_parameters(ranks: Ranks) -> None:
    got = [[k for k in kinds if k != "Parameter"] for kinds in ranks.run(ignored_entries)]
    assert_same_on_all_ranks(got, ["Tensor"], what="types")

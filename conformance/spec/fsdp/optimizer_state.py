"""FSDP optimizer state dicts: full or sharded, loading, exchange, and distributed checkpoints."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullOptimStateDictConfig, OptimStateKeyType, StateDictType
from torch.distributed.fsdp.wrap import always_wrap_policy

from conformance import (
    Chapter,
    Me,
    Ranks,
    assert_same_on_all_ranks,
    assert_that,
    covers,
    world_sizes,
)
from conformance.checks.compare import first_difference
from conformance.spec.fsdp.models import Net
from conformance.spec.fsdp.state_dict_kinds import (
    FULL,
    ON_DEVICE,
    SHARDED,
    SHARDS,
    adam,
    bare_training,
    by_name,
    loadable,
    saved,
    tensors,
)
from conformance.spec.fsdp.training_runs import (
    CPU,
    STRATEGIES,
    Recipe,
    both,
    both_kinds,
    check_tensors,
    full_parameters,
    step_whole,
    train_step,
    trained,
    wrap,
)

DOCS = "torch 2.13 docs, FullyShardedDataParallel"

chapter = Chapter("fsdp")


def full_optimizer_state(me: Me, recipe: Recipe, config: Any) -> dict[str, Tensor]:
    model, optimizer = trained(me, recipe)
    return tensors(saved(model, optimizer, FULL, config))


def check_full(ranks: Ranks, orig: bool, config: Any) -> None:
    for strategy in STRATEGIES:
        recipe = adam(strategy=strategy, orig=orig)
        want = by_name(*bare_training(recipe, ranks.world_size))
        got = ranks.run(full_optimizer_state, recipe, config)
        check_tensors(got, [want] * ranks.world_size, within=1e-6)


@chapter.must(
    "fsdp/full-optimizer-state",
    "A full optimizer state dict has the bare module's state, parameter by parameter, under "
    "their names.",
    source=f"{DOCS}, optim_state_dict",
)
@world_sizes(1, 2, 3)
def test_full_state(ranks: Ranks) -> None:
    check_full(ranks, False, ON_DEVICE)


@chapter.must(
    "fsdp/full-optimizer-state-original",
    "With use_orig_params=True the full optimizer state dict is the same.",
    source=f"{DOCS}, optim_state_dict",
)
@world_sizes(2, 3)
def test_full_state_with_original_parameters(ranks: Ranks) -> None:
    check_full(ranks, True, ON_DEVICE)


def steps_of_each(me: Me) -> dict[str, int]:
    """The steps that the state dict counts; the bias has no gradient in the second one."""
    model = wrap(me, nn.Linear(3, 2), use_orig_params=True)
    optimizer = torch.optim.Adam(model.parameters())
    for number in range(2):
        model(torch.ones(1, 3, device=me.device)).sum().backward()
        if number == 1:
            model.bias.grad = None
        optimizer.step()
    state = saved(model, optimizer, FULL, ON_DEVICE)["state"]
    return {name: int(of_one["step"]) for name, of_one in sorted(state.items())}


@covers("fsdp/full-optimizer-state-original")
@world_sizes(2)
def test_parameters_of_one_unit_count_their_own_steps(ranks: Ranks) -> None:
    got = ranks.run(steps_of_each)
    assert_same_on_all_ranks(got, {"bias": 1, "weight": 2}, what="steps")


@chapter.must(
    "fsdp/full-optimizer-state-offloaded",
    "The full optimizer state dict is right with offload_to_cpu, which is the default, also on "
    "the CPU.",
    source=f"{DOCS}, FullOptimStateDictConfig",
)
@world_sizes(2)
@both_kinds
def test_full_state_offloaded(ranks: Ranks, orig: bool) -> None:
    check_full(ranks, orig, FullOptimStateDictConfig())


def come_back(me: Me, recipe: Recipe, kind: StateDictType, config: Any) -> str:
    """How what can be loaded differs from the optimizer's own state."""
    model, optimizer = trained(me, recipe)
    return change_on_the_way(model, optimizer, kind, config)


def change_on_the_way(
    model: Any, optimizer: torch.optim.Optimizer, kind: StateDictType, config: Any
) -> str:
    """How the optimizer's state differs after saving and loading."""
    own = copy.deepcopy(optimizer.state_dict())
    back = loadable(model, optimizer, saved(model, optimizer, kind, config), kind, config)
    ours = {str(k): own["state"][k] for k in sorted(own["state"])}
    theirs = {str(k): back["state"][k] for k in sorted(back["state"])}
    found = first_difference(tensors({"state": theirs}), tensors({"state": ours}))
    return str(found or "")


@chapter.must(
    "fsdp/optimizer-state-loads",
    "optim_state_dict_to_load turns the result of optim_state_dict, full or sharded, back into "
    "the rank's own state.",
    source=f"{DOCS}, optim_state_dict_to_load",
)
@world_sizes(2, 3)
@both_kinds
def test_state_comes_back(ranks: Ranks, orig: bool) -> None:
    for strategy in STRATEGIES[:2]:
        for kind, config in ((FULL, ON_DEVICE), (SHARDED, SHARDS)):
            got = ranks.run(come_back, adam(strategy=strategy, orig=orig), kind, config)
            assert_same_on_all_ranks(got, "", what=f"differences, {kind.name}")


def come_back_beside_ignored(me: Me, orig: bool, kind: StateDictType, config: Any) -> str:
    """As `come_back`, of a model with a layer that FSDP ignores and the optimizer steps."""
    layers = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)).to(me.device)
    model = wrap(me, layers, ignored_modules=[layers[1]], use_orig_params=orig)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.ones(1, 3, device=me.device)).sum().backward()
    optimizer.step()
    return change_on_the_way(model, optimizer, kind, config)


@covers("fsdp/optimizer-state-loads")
@world_sizes(2)
@both_kinds
def test_state_of_ignored_parameters_comes_back(ranks: Ranks, orig: bool) -> None:
    for kind, config in ((FULL, ON_DEVICE), (SHARDED, SHARDS)):
        got = ranks.run(come_back_beside_ignored, orig, kind, config)
        assert_same_on_all_ranks(got, "", what=f"differences beside ignored, {kind.name}")


def step_after_loading(me: Me, recipe: Recipe) -> str:
    """How a state dict changes when its optimizer loads it and steps.

    With original parameters without counts of steps: torch 2.13 loads these as they are.
    """
    model, optimizer = trained(me, recipe)
    state = saved(model, optimizer, FULL, ON_DEVICE)
    loaded = {k: v for k, v in tensors(state).items() if not (recipe.orig and k.endswith(".step"))}
    before = copy.deepcopy(loaded)
    optimizer.load_state_dict(loadable(model, optimizer, state, FULL, ON_DEVICE))
    train_step(me, recipe, model, optimizer, 50)
    return str(first_difference(loaded, before) or "")


@covers("fsdp/optimizer-state-loads")
@world_sizes(2)
@both_kinds
def test_steps_do_not_change_what_was_loaded(ranks: Ranks, orig: bool) -> None:
    got = ranks.run(step_after_loading, adam(orig=orig))
    assert_same_on_all_ranks(got, "", what="changes of the loaded state dict")


def names_beside_module(me: Me, orig: bool) -> list[list[str]]:
    """Names in the state dicts of a model and of its optimizer."""
    inner = nn.Sequential(OrderedDict(module=nn.Linear(2, 2)))
    layers = nn.Sequential(OrderedDict(module=inner, other=nn.Linear(2, 2)))
    model = wrap(me, layers, use_orig_params=orig, auto_wrap_policy=always_wrap_policy)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2, device=me.device)).sum().backward()
    optimizer.step()
    state = saved(model, optimizer, FULL, ON_DEVICE)["state"]
    with type(model).state_dict_type(model, FULL):
        return [sorted(model.state_dict()), sorted(state)]


@covers("fsdp/full-optimizer-state")
@world_sizes(2)
@both_kinds
def test_a_layer_may_be_called_module(ranks: Ranks, orig: bool) -> None:
    names = ["module.module.bias", "module.module.weight", "other.bias", "other.weight"]
    assert_same_on_all_ranks(ranks.run(names_beside_module, orig), [names, names], what="names")


def come_back_from_rank_0(me: Me, recipe: Recipe) -> tuple[int, str]:
    """Entries of this rank's state dict; differences after loading."""
    config = FullOptimStateDictConfig(rank0_only=True, offload_to_cpu=False)
    model, optimizer = trained(me, recipe)
    state = saved(model, optimizer, FULL, config)
    back = loadable(model, optimizer, state, FULL, config)
    own = optimizer.state_dict()["state"]
    found = first_difference(
        tensors({"state": {str(k): v for k, v in back["state"].items()}}),
        tensors({"state": {str(k): v for k, v in own.items()}}),
    )
    return len(state.get("state", {})), str(found or "")


@chapter.must(
    "fsdp/optimizer-state-on-rank-0",
    "With rank0_only the optimizer state dict of the other ranks is empty, and loading from it "
    "gives every rank its state.",
    source=f"{DOCS}, FullOptimStateDictConfig",
)
@world_sizes(2, 3)
def test_state_on_rank_0(ranks: Ranks) -> None:
    parameters = len(list(Net().make().parameters()))
    for rank, (entries, differences) in enumerate(ranks.run(come_back_from_rank_0, adam())):
        assert_that(entries == (0 if rank else parameters), f"{entries} entries", rank)
        assert_that(not differences, differences, rank)


def rates_from_rank_0(me: Me) -> tuple[float, list[float]]:
    """The learning rate that is saved; those that are loaded for an optimizer with another one."""
    config = FullOptimStateDictConfig(rank0_only=True, offload_to_cpu=False)
    model, optimizer = trained(me, adam())
    state = saved(model, optimizer, FULL, config)
    rate = optimizer.param_groups[0]["lr"]
    other = torch.optim.Adam(model.parameters(), lr=0.5 + me.rank)
    return rate, [g["lr"] for g in loadable(model, other, state, FULL, config)["param_groups"]]


@chapter.must(
    "fsdp/optimizer-options-from-rank-0",
    "With rank0_only, every rank loads the hyperparameters that were saved, such as the learning "
    "rate, even if its own optimizer has others.",
    source=f"{DOCS}, FullOptimStateDictConfig",
    rests_on="fsdp/optimizer-state-on-rank-0",
)
@world_sizes(2)
def test_options_from_rank_0(ranks: Ranks) -> None:
    for rank, (rate, loaded) in enumerate(ranks.run(rates_from_rank_0)):
        assert_that(loaded == [rate], f"learning rates {loaded}, not {rate}", rank)


def load_into_another(me: Me, recipe: Recipe, first: Any, second: Any, kind: Any) -> list[Any]:
    """Parameters of two models one step after the second has loaded everything of the first."""
    config = ON_DEVICE if kind is FULL else SHARDS
    a, a_optimizer = trained(me, recipe, first)
    b, b_optimizer = trained(me, recipe, second, seed=9)
    with type(a).state_dict_type(a, kind), type(b).state_dict_type(b, kind):
        b.load_state_dict(a.state_dict())
    state = saved(a, a_optimizer, kind, config)
    with type(b).state_dict_type(b, kind, None, config):
        type(b).optim_state_dict_to_load(b, b_optimizer, state, load_directly=True)
    for model, optimizer in ((a, a_optimizer), (b, b_optimizer)):
        train_step(me, recipe, model, optimizer, 50)
    return [full_parameters(a), full_parameters(b)]


@chapter.must(
    "fsdp/optimizer-loads-directly",
    "With load_directly the optimizer has the state that was saved.",
    source=f"{DOCS}, optim_state_dict_to_load",
)
@world_sizes(2, 3)
@both_kinds
def test_loading_directly(ranks: Ranks, orig: bool) -> None:
    for kind in (FULL, SHARDED):
        for before, after in ranks.run(load_into_another, adam(orig=orig), None, None, kind):
            check_tensors([after], [before], within=0)


def exchange_with_torch(me: Me, recipe: Recipe, kind: StateDictType) -> list[list[Any]]:
    """As `load_into_another`, from torch to the target and back."""
    target, torchs = both(me)
    pairs = ((torchs, target), (target, torchs))
    return [load_into_another(me, recipe, first, second, kind) for first, second in pairs]


@covers("fsdp/exchanges-full-with-torch")
@world_sizes(2)
@both_kinds
def test_full_exchange_with_torch(ranks: Ranks, orig: bool) -> None:
    for pairs in ranks.run(exchange_with_torch, adam(orig=orig), FULL):
        for before, after in pairs:
            check_tensors([after], [before], within=0)


@covers("fsdp/exchanges-sharded-with-torch")
@world_sizes(2)
@both_kinds
def test_sharded_exchange_with_torch(ranks: Ranks, orig: bool) -> None:
    for pairs in ranks.run(exchange_with_torch, adam(orig=orig), SHARDED):
        for before, after in pairs:
            check_tensors([after], [before], within=0)


def to_bare_and_back(me: Me, recipe: Recipe) -> list[dict[str, Tensor]]:
    """Full parameters after a step of: the sharded model, the bare module that took over its state
    (on all ranks' batches), and another sharded model that took over the bare module's."""
    model, optimizer = trained(me, recipe)
    cls = type(model)
    with cls.state_dict_type(model, FULL, None, ON_DEVICE):
        weights = {n: v.clone() for n, v in model.state_dict().items()}
        state = copy.deepcopy(cls.optim_state_dict(model, optimizer))
    bare = recipe.net.make(device=me.device)
    bare.load_state_dict(weights)
    bare_optimizer = recipe.optimizer_of(bare)
    numbered = cls.rekey_optim_state_dict(state, OptimStateKeyType.PARAM_ID, bare)
    bare_optimizer.load_state_dict(numbered)
    named = cls.rekey_optim_state_dict(
        bare_optimizer.state_dict(), OptimStateKeyType.PARAM_NAME, bare, optim=bare_optimizer
    )
    other = recipe.wrapped(me, seed=9)
    other.load_state_dict(weights)
    other_optimizer = recipe.optimizer_of(other)
    with cls.state_dict_type(other, FULL, None, ON_DEVICE):
        turned = cls.optim_state_dict_to_load(other, other_optimizer, copy.deepcopy(named))
    other_optimizer.load_state_dict(turned)
    for sharded, its in ((model, optimizer), (other, other_optimizer)):
        train_step(me, recipe, sharded, its, 60)
    if me.device == CPU:
        step_whole(recipe, bare, bare_optimizer, me.world_size, 60)
    params = {name: param.detach() for name, param in bare.named_parameters()}
    kept = params if me.device == CPU else full_parameters(model)
    return [full_parameters(model), kept, full_parameters(other)]


def check_taken_over(ranks: Ranks, orig: bool) -> None:
    for sharded, bare, again in ranks.run(to_bare_and_back, adam(orig=orig)):
        check_tensors([bare], [sharded], within=1e-6)
        check_tensors([again], [sharded], within=1e-9)


@chapter.must(
    "fsdp/optimizer-state-and-the-bare-module",
    "rekey_optim_state_dict converts optimizer state of original parameters for the bare "
    "module's optimizer and back, and both continue alike.",
    source=f"{DOCS}, rekey_optim_state_dict",
)
@world_sizes(2, 3)
def test_the_bare_module_takes_over(ranks: Ranks) -> None:
    check_taken_over(ranks, True)


@chapter.must(
    "fsdp/optimizer-state-of-units-and-the-bare-module",
    "Optimizer state of flat parameters, too, can be converted for the bare module's optimizer "
    "and back.",
    source="derived; in torch 2.13 all parameters of a unit share one count of steps",
)
@world_sizes(2, 3)
def test_the_bare_module_takes_over_from_flat_parameters(ranks: Ranks) -> None:
    """Each parameter counts its own steps, whatever the unit that it was in."""
    check_taken_over(ranks, False)


def frozen_state(me: Me, recipe: Recipe) -> list[str]:
    """Names in the state dict of an optimizer."""
    model = recipe.wrapped(me)
    optimizer = recipe.optimizer_of(model)
    train_step(me, recipe, model, optimizer, 0)
    return sorted(saved(model, optimizer, FULL, ON_DEVICE)["state"])


@chapter.must(
    "fsdp/frozen-have-no-state",
    "The optimizer state dict has entries for what the optimizer steps, and only for that.",
    source="torch 2.13, _optim_state_dict",
)
@world_sizes(2, 3)
def test_what_has_state(ranks: Ranks) -> None:
    net = Net(frozen="parts")
    want = sorted(name for name, p in net.make().named_parameters() if p.requires_grad)
    got = ranks.run(frozen_state, adam(net=net, orig=True))
    assert_same_on_all_ranks(got, want, what="names with state")


def group_options(me: Me) -> list[tuple[float, list[str]]]:
    """Learning rate and names of two groups, after saving and loading."""
    recipe = adam(orig=True)
    model = recipe.wrapped(me)
    named = dict(model.named_parameters())
    heads = [p for name, p in named.items() if "head" in name]
    rest = [p for name, p in named.items() if "head" not in name]
    optimizer = torch.optim.Adam([{"params": heads, "lr": 0.5}, {"params": rest, "lr": 0.25}])
    train_step(me, recipe, model, optimizer, 0)
    state = saved(model, optimizer, FULL, ON_DEVICE)
    back = loadable(model, optimizer, copy.deepcopy(state), FULL, ON_DEVICE)
    found = [(group["lr"], sorted(group["params"])) for group in state["param_groups"]]
    return found + [(group["lr"], []) for group in back["param_groups"]]


@chapter.must(
    "fsdp/parameter-groups",
    "Parameter groups keep their options, and list names of parameters.",
    source="torch 2.13, _unflatten_param_groups",
)
@world_sizes(2)
def test_parameter_groups(ranks: Ranks) -> None:
    names = sorted(name for name, _ in Net().make().named_parameters())
    rest = [name for name in names if name != "head.weight"]
    want = [(0.5, ["head.weight"]), (0.25, rest), (0.5, []), (0.25, [])]
    assert_same_on_all_ranks(ranks.run(group_options), want, what="groups")


def change_rates(me: Me) -> list[float]:
    """The learning rate in a state dict, after the optimizer's and the loaded one were changed."""
    model = wrap(me, nn.Linear(3, 2), use_orig_params=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.5))
    model(torch.ones(1, 3, device=me.device)).sum().backward()
    optimizer.step()
    state = saved(model, optimizer, FULL, ON_DEVICE)
    loaded = loadable(model, optimizer, state, FULL, ON_DEVICE)
    found = []
    for groups in (optimizer.param_groups, loaded["param_groups"]):
        groups[0]["lr"].fill_(0.25)
        found.append(state["param_groups"][0]["lr"].item())
    return found


@covers("fsdp/parameter-groups")
@world_sizes(2)
def test_parameter_groups_are_copied(ranks: Ranks) -> None:
    assert_same_on_all_ranks(ranks.run(change_rates), [0.5, 0.5], what="saved learning rates")


def channels_last_state(me: Me) -> bool:
    """Whether state that was saved and loaded lies where it did."""
    conv = nn.Conv2d(3, 4, 2).to(me.device)
    conv.weight.data = conv.weight.data.contiguous(memory_format=torch.channels_last)
    model = wrap(me, conv, use_orig_params=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.arange(96.0, device=me.device).reshape(2, 3, 4, 4)).pow(2).sum().backward()
    optimizer.step()
    own = copy.deepcopy(optimizer.state_dict()["state"])
    state = saved(model, optimizer, FULL, ON_DEVICE)
    back = loadable(model, optimizer, state, FULL, ON_DEVICE)["state"]
    keys = ("exp_avg", "exp_avg_sq")
    return all(torch.equal(own[k][key], back[k][key]) for k in own for key in keys if key in own[k])


@chapter.must(
    "fsdp/optimizer-state-channels-last",
    "Optimizer state of parameters in another memory format is loaded into the same places that "
    "it was saved from.",
    source="derived; torch 2.13 flattens it in the usual order",
)
@world_sizes(2)
def test_state_of_channels_last_parameters(ranks: Ranks) -> None:
    assert_same_on_all_ranks(ranks.run(channels_last_state), True, what="came back to its place")


def older_functions(me: Me) -> list[str]:
    """How the state that each older function gives differs from the optimizer's own."""
    recipe = adam()
    model, optimizer = trained(me, recipe)
    cls = type(model)
    own = tensors({"state": {str(k): v for k, v in optimizer.state_dict()["state"].items()}})
    on_rank_0 = cls.full_optim_state_dict(model, optimizer)
    full = cls.full_optim_state_dict(model, optimizer, rank0_only=False)
    shards = cls.sharded_optim_state_dict(model, optimizer)
    loaded = {
        "scatter": cls.scatter_full_optim_state_dict(on_rank_0, model, optim=optimizer),
        "shard": cls.shard_full_optim_state_dict(full, model, optim=optimizer),
        "flatten": cls.flatten_sharded_optim_state_dict(shards, model, optimizer),
    }
    found = [
        f"{name}: {first_difference(tensors({'state': numbered(state)}), own)}"
        for name, state in loaded.items()
        if first_difference(tensors({"state": numbered(state)}), own)
    ]
    return found + [f"rank {me.rank} has all"] * (bool(on_rank_0) != (me.rank == 0))


def numbered(state: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a state, with numbers as text."""
    return {str(k): v for k, v in state["state"].items()}


@chapter.must(
    "fsdp/older-optimizer-functions",
    "full_optim_state_dict, shard_full_optim_state_dict, scatter_full_optim_state_dict, "
    "sharded_optim_state_dict and flatten_sharded_optim_state_dict give and take the same state.",
    source=f"{DOCS}, deprecated functions",
)
@world_sizes(2, 3)
def test_older_functions(ranks: Ranks) -> None:
    assert_same_on_all_ranks(ranks.run(older_functions), [], what="differences")

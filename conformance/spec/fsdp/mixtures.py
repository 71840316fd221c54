"""FSDP units with different strategies, dtypes and buffers; checkpointed names; groups; outputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import (
    FullStateDictConfig,
    MixedPrecision,
    ShardingStrategy,
)

from conformance import (
    Chapter,
    Me,
    Ranks,
    assert_same_on_all_ranks,
    assert_that,
    covers,
    world_sizes,
)
from conformance.oracle.near import Near
from conformance.spec.fsdp.custom import inputs, linear
from conformance.spec.fsdp.models import Net
from conformance.spec.fsdp.recording import trace_of_a_step
from conformance.spec.fsdp.state_dict_kinds import (
    FULL,
    ON_DEVICE,
    SHARDED,
    adam,
    check_rows,
    rows_of,
    saved,
)
from conformance.spec.fsdp.training_runs import (
    STRATEGIES,
    Recipe,
    Run,
    both_kinds,
    check_runs,
    check_tensors,
    full_parameters,
    mean_gradients,
    train_step,
    train_whole,
    wrap,
)
from conformance.spec.tolerance import assert_near

DOCS = "torch 2.13 docs, FullyShardedDataParallel"

chapter = Chapter("fsdp")


# Strategies


def mixed(me: Me, net: Net, orig: bool, strategy: str) -> Any:
    """The first block is replicated, the second one keeps what it has gathered."""

    def unit(module: nn.Module, strategy: str) -> Any:
        return wrap(me, module, sharding_strategy=ShardingStrategy[strategy], use_orig_params=orig)

    network = net.make()
    first, second = network.blocks
    network.blocks = nn.ModuleList([unit(first, "NO_SHARD"), unit(second, "SHARD_GRAD_OP")])
    return unit(network, strategy)


def train_mixed(me: Me, recipe: Recipe) -> Run:
    model = mixed(me, recipe.net, recipe.orig, recipe.strategy)
    optimizer = recipe.optimizer_of(model)
    losses = []
    for step in range(recipe.steps):
        losses += train_step(me, recipe, model, optimizer, step)
    return Run(losses, full_parameters(model))


@chapter.must(
    "fsdp/mixed-strategies",
    "Units with different sharding strategies under one root train like the bare module.",
    source="torch 2.13, CustomPolicy: keyword arguments of one unit",
)
@world_sizes(2, 3)
@both_kinds
def test_mixed_strategies(ranks: Ranks, orig: bool) -> None:
    for strategy in ("FULL_SHARD", "NO_SHARD"):
        recipe = Recipe(strategy=strategy, orig=orig)
        check_runs(ranks.run(train_mixed, recipe), train_whole(recipe, ranks.world_size))


def mixed_norms(me: Me, net: Net, orig: bool, strategy: str) -> list[Tensor]:
    """Norms 1, 2 and infinity, and norm 2 again after clipping to a quarter."""
    model = mixed(me, net, orig, strategy)
    net.loss(model, me.rank, 0, me.device).backward()
    found: list[Tensor] = [model.clip_grad_norm_(1e9, kind) for kind in (1.0, float("inf"), 2.0)]
    model.clip_grad_norm_(found[-1].item() / 4)
    return [*found, model.clip_grad_norm_(1e9)]


@chapter.must(
    "fsdp/norm-of-mixed-strategies",
    "Where some units are sharded and others are not, the norm counts each element once, and "
    "clipping scales all gradients.",
    source="torch 2.13, clip_grad_norm_: sharded and nonsharded gradients",
)
@world_sizes(2, 3)
@both_kinds
def test_norms_of_mixed_strategies(ranks: Ranks, orig: bool) -> None:
    net = Net(dtype="float32")
    grads = list(mean_gradients(net, ranks.world_size).values())
    want = [nn.utils.get_total_norm(grads, kind) for kind in (1.0, float("inf"), 2.0)]
    near = [Near.relative(norm, 1e-4) for norm in (*want, want[-1] / 4)]
    for strategy in ("FULL_SHARD", "NO_SHARD"):
        for mine in ranks.run(mixed_norms, net, orig, strategy):
            assert_near(mine, near, "norms 1, infinity, 2 and clipped, as if of four ranks")


# Names


def checkpointed_names(me: Me, orig: bool) -> list[list[str]]:
    """Names in full and sharded state dicts, and in the optimizer's."""
    recipe = adam(orig=orig)
    network = recipe.net.make()
    network.blocks = nn.ModuleList(
        wrap(me, checkpoint_wrapper(block), use_orig_params=orig) for block in network.blocks
    )
    model = wrap(me, network, use_orig_params=orig)
    optimizer = recipe.optimizer_of(model)
    train_step(me, recipe, model, optimizer, 0)
    with type(model).state_dict_type(model, SHARDED):
        shards = list(model.state_dict())
    state = saved(model, optimizer, FULL, ON_DEVICE)
    stepped = [sorted(state["state"]), sorted(state["param_groups"][0]["params"])]
    return [list(model.state_dict()), shards, *stepped]


@chapter.must(
    "fsdp/checkpointed-names",
    "Names in state dicts of a model and of its optimizer are the bare module's, also if units "
    "recompute their activations.",
    source="torch 2.13, clean_tensor_name",
)
@world_sizes(2)
@both_kinds
def test_names_of_checkpointed_units(ranks: Ranks, orig: bool) -> None:
    bare = Net().make()
    keys = list(bare.state_dict())
    names = sorted(name for name, _ in bare.named_parameters())
    got = ranks.run(checkpointed_names, orig)
    assert_same_on_all_ranks(got, [keys, keys, names, names], what="names")


# Precision


class AroundUnit(nn.Module):
    """A unit between two layers; it is called with a keyword argument too."""

    def __init__(self, unit: nn.Module) -> None:
        super().__init__()
        self.first, self.unit, self.last = linear(3, 3, 1).float(), unit, linear(3, 2, 2).float()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        out: Tensor = self.last(self.unit(hidden, scale=x[0]).float())
        return out


class Scaling(nn.Linear):
    """Notes dtypes of what it is given."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.load_state_dict(linear(3, 3, 3).state_dict())
        self.seen: list[str] = []

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        assert scale is not None
        self.seen += [str(x.dtype), str(scale.dtype)]
        return super().forward(x) * scale


def cast_inputs_of_unit(me: Me, orig: bool) -> tuple[list[str], dict[str, Tensor]]:
    """Dtypes of what the unit gets; parameters after a step, and the gradient of the input."""
    low = MixedPrecision(torch.bfloat16, torch.float32, cast_forward_inputs=True)
    layer = Scaling()
    unit = wrap(me, layer, mixed_precision=low, use_orig_params=orig)
    model = wrap(me, AroundUnit(unit), use_orig_params=orig)
    grad = step_around_unit(model, me.device)
    return layer.seen, {**full_parameters(model), "input": grad}


def step_around_unit(model: Any, device: torch.device) -> Tensor:
    x = inputs(0, 0).float().to(device).requires_grad_()
    model(x).pow(2).sum().backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    assert x.grad is not None
    return x.grad


@chapter.must(
    "fsdp/cast-unit-inputs",
    "With cast_forward_inputs an inner unit gets its inputs in its param_dtype, and gradients "
    "flow back through the cast.",
    source="torch 2.13 docs, MixedPrecision",
)
@world_sizes(2)
@both_kinds
def test_a_unit_that_casts_its_inputs(ranks: Ranks, orig: bool) -> None:
    bare = AroundUnit(Scaling())
    grad = step_around_unit(bare, torch.device("cpu"))
    want = {name: param.detach() for name, param in bare.named_parameters()}
    want["input"] = grad
    got = ranks.run(cast_inputs_of_unit, orig)
    assert_same_on_all_ranks(
        [seen for seen, _ in got], ["torch.bfloat16"] * 2, what="dtypes of inputs"
    )
    check_tensors([found for _, found in got], [want] * ranks.world_size, within=0.03)


def states_in_low_precision(me: Me, orig: bool) -> list[dict[str, Tensor]]:
    """Parameters in a full state dict, as they are summoned, and this rank's rows of each."""
    net = Net(dtype="float32")
    model = Recipe(net, orig=orig).wrapped(me, mixed_precision=MixedPrecision(torch.bfloat16))
    net.loss(model, me.rank, 0, me.device).backward()
    full = {name: value.clone() for name, value in model.state_dict().items() if value.dim()}
    with type(model).state_dict_type(model, SHARDED):
        rows = rows_of(model.state_dict())
    return [full, full_parameters(model), rows]


@chapter.must(
    "fsdp/state-dict-in-full-precision",
    "With a param_dtype, state dicts and summon_full_params still have parameters in full "
    "precision, bit for bit.",
    source="torch 2.13 docs, MixedPrecision: checkpointing is in full precision",
)
@world_sizes(2)
@both_kinds
def test_state_dicts_in_full_precision(ranks: Ranks, orig: bool) -> None:
    bare = Net(dtype="float32").make()
    want = {name: param.detach() for name, param in bare.named_parameters()}
    got = ranks.run(states_in_low_precision, orig)
    for full, summoned, _ in got:
        check_tensors([full, summoned], [want, want], within=0)
    check_rows([rows for _, _, rows in got], want, within=0)


class Holding(nn.Linear):
    """A layer with a buffer that it does not use."""

    held: Tensor

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.register_buffer("held", torch.ones(3))


def unit_buffer_dtypes(me: Me) -> list[str]:
    """Dtypes of the buffers of the root, of a unit, and of an ignored module, after a forward."""
    layers = [Holding().to(me.device) for _ in range(3)]
    unit = wrap(me, layers[1], mixed_precision=MixedPrecision(buffer_dtype=torch.float64))
    model = wrap(
        me,
        nn.Sequential(layers[0], unit, layers[2]),
        mixed_precision=MixedPrecision(buffer_dtype=torch.bfloat16),
        ignored_modules=[layers[2]],
    )
    with torch.no_grad():
        model(torch.ones(2, 3, device=me.device))
    return [str(layer.held.dtype) for layer in layers]


@chapter.must(
    "fsdp/buffer-dtype-of-units",
    "The innermost instance determines a buffer's dtype, and buffers of ignored modules keep "
    "theirs.",
    source="torch 2.13, _get_buffers_and_dtypes_for_computation",
)
@world_sizes(2)
def test_buffers_of_units(ranks: Ranks) -> None:
    want = ["torch.bfloat16", "torch.float64", "torch.float32"]
    assert_same_on_all_ranks(ranks.run(unit_buffer_dtypes), want, what="dtypes of buffers")


def keeping(me: Me, strategy: str, orig: bool, reduced: torch.dtype | None = None) -> Any:
    """A layer whose gradients stay in low precision."""
    return wrap(
        me,
        nn.Linear(3, 2),
        sharding_strategy=ShardingStrategy[strategy],
        use_orig_params=orig,
        mixed_precision=MixedPrecision(torch.bfloat16, reduced, keep_low_precision_grads=True),
    )


def kept_dtypes(me: Me, strategy: str, orig: bool) -> list[str]:
    """Dtypes of gradients."""
    model = keeping(me, strategy, orig)
    model(torch.ones(1, 3, device=me.device)).sum().backward()
    return sorted({str(p.grad.dtype) for p in model.parameters() if p.grad is not None})


@chapter.must(
    "fsdp/keep-low-precision-gradients",
    "With keep_low_precision_grads gradients stay in the dtype in which they were reduced, also "
    "if they accumulate, and otherwise have the parameters' dtype.",
    source=f"{DOCS}, MixedPrecision",
)
@world_sizes(2)
@both_kinds
def test_gradients_of_each_strategy(ranks: Ranks, orig: bool) -> None:
    for strategy in STRATEGIES:
        got = ranks.run(kept_dtypes, strategy, orig)
        assert_same_on_all_ranks(got, ["torch.bfloat16"], what=f"gradients with {strategy}")


def kept_twice(me: Me, strategy: str, orig: bool, reduced: torch.dtype | None) -> list[bool]:
    """Whether gradients after a second backward pass are twice those after the first, of each
    parameter that has one on this rank."""
    model = keeping(me, strategy, orig, reduced)
    passes = []
    for _ in range(2):
        model(torch.ones(1, 3, device=me.device)).sum().backward()
        passes.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    return [second.equal(2 * first) for first, second in zip(*passes, strict=True)]


@covers("fsdp/keep-low-precision-gradients")
@world_sizes(2)
@both_kinds
@pytest.mark.parametrize("reduced", [None, torch.float32], ids=str)
def test_kept_gradients_accumulate(ranks: Ranks, orig: bool, reduced: torch.dtype | None) -> None:
    for strategy in STRATEGIES:
        for rank, twice in enumerate(ranks.run(kept_twice, strategy, orig, reduced)):
            lost = f"with {strategy}, the first pass's gradients are lost"
            assert_that(bool(twice) and all(twice), lost, rank)


@chapter.must(
    "fsdp/scatter-dtype",
    "Gradients are reduced in the reduce_dtype or, if there is none, in the param_dtype.",
    source=f"{DOCS}, MixedPrecision, reduce_dtype",
)
@world_sizes(2)
def test_dtypes_of_replicas(ranks: Ranks) -> None:
    precision = MixedPrecision(torch.bfloat16, torch.float32)
    kwargs = {"mixed_precision": precision}
    recipe = Recipe(Net(dtype="float32"), strategy="NO_SHARD", kwargs=kwargs)
    for rank, (_, _, backward) in enumerate(ranks.run(trace_of_a_step, recipe)):
        seen = sorted({f"{exchange.kind} {exchange.dtype}" for exchange in backward})
        assert_that(seen == ["all_reduce float32"], f"the backward issued {seen}", rank)


# Groups


def entries_on_rank_0(me: Me, parts: list[list[int]]) -> int:
    """Entries of a full state dict with rank0_only."""
    groups = [dist.new_group(part) for part in parts]
    group = next(g for part, g in zip(parts, groups, strict=True) if me.rank in part)
    model = Recipe().wrapped(me, process_group=group)
    with type(model).state_dict_type(model, FULL, FullStateDictConfig(rank0_only=True)):
        return len(model.state_dict())


@chapter.must(
    "fsdp/rank-0-of-a-group",
    "With a process_group, rank0_only refers to that group's first rank.",
    source="torch 2.13, _full_post_state_dict_hook: the instance's rank in its group",
)
@world_sizes(4)
def test_rank_0_of_each_group(ranks: Ranks) -> None:
    everything = len(Net().make().state_dict())
    got = ranks.run(entries_on_rank_0, [[0, 1], [2, 3]])
    words = f"entries of state dicts: {got}, want all on the ranks 0 and 2"
    assert_that(got == [everything, 0, everything, 0], words)


# Containers


class Pair(NamedTuple):
    """As a forward may be given it."""

    x: Tensor
    name: str


@dataclass
class Result:
    """As a forward may return it."""

    out: Tensor
    name: str


class Unpacking(nn.Linear):
    def forward(self, pair: Any) -> Any:
        return Result(super().forward(pair.x), pair.name)


def unpack(me: Me, orig: bool) -> list[str]:
    """Types of what comes in and goes out, and whether there are gradients."""
    low = MixedPrecision(torch.bfloat16)
    model = wrap(me, Unpacking(3, 2), mixed_precision=low, use_orig_params=orig)
    out = model(Pair(torch.ones(1, 3, device=me.device), "text"))
    out.out.sum().backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return [type(out).__name__, str(out.out.dtype), out.name, str(bool(grads))]


@covers("fsdp/inputs-and-outputs")
@world_sizes(2)
@both_kinds
def test_named_tuples_and_dataclasses(ranks: Ranks, orig: bool) -> None:
    want = ["Result", "torch.bfloat16", "text", "True"]
    assert_same_on_all_ranks(ranks.run(unpack, orig), want, what="outputs")


def ignore_states(me: Me) -> tuple[list[int], bool]:
    """The shape of an ignored module's weight, and whether it is the module's own."""
    last = nn.Linear(3, 2)
    weight = last.weight
    wrap(me, nn.Sequential(nn.Linear(4, 3), last), ignored_states=[last])
    return list(last.weight.shape), last.weight is weight


@covers("fsdp/ignored-modules")
@world_sizes(2)
def test_ignored_states_may_be_modules(ranks: Ranks) -> None:
    assert_same_on_all_ranks(ranks.run(ignore_states), ([2, 3], True), what="ignored weight")

"""FSDP's methods summon_full_params, apply, clip_grad_norm_ and no_sync."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import ShardingStrategy

from conformance import Chapter, Me, Ranks, assert_same_on_all_ranks, assert_that, world_sizes
from conformance.oracle.near import Near
from conformance.spec.fsdp.custom import inputs, linear
from conformance.spec.fsdp.models import Net
from conformance.spec.fsdp.small_models import branches
from conformance.spec.fsdp.training_runs import (
    CPU,
    HYBRIDS,
    STRATEGIES,
    Recipe,
    both_kinds,
    check_runs,
    check_tensors,
    check_training,
    full_parameters,
    halves,
    mean_gradients,
    train_in_halves,
    train_whole,
    trained,
    wrap,
)
from conformance.spec.raising import assert_raised
from conformance.spec.tolerance import assert_near

DOCS = "torch 2.13 docs, FullyShardedDataParallel"

chapter = Chapter("fsdp")


def summoned(me: Me, recipe: Recipe) -> tuple[dict[str, Tensor], list[str]]:
    """Full parameters after training, and names of buffers."""
    model, _ = trained(me, recipe)
    with type(model).summon_full_params(model):
        buffers = [name for name, _ in model.named_buffers()]
    return full_parameters(model), buffers


@chapter.must(
    "fsdp/summon",
    "Inside summon_full_params all parameters have the bare module's names, shapes and values.",
    source=f"{DOCS}, summon_full_params",
)
@world_sizes(1, 2, 3)
@both_kinds
def test_what_is_summoned(ranks: Ranks, orig: bool) -> None:
    for strategy in STRATEGIES:
        recipe = Recipe(strategy=strategy, orig=orig)
        got = ranks.run(summoned, recipe)
        want = train_whole(recipe, ranks.world_size)
        check_tensors([params for params, _ in got], [run.params for run in want])
        assert_same_on_all_ranks([names for _, names in got], ["scale"], what="buffers")


def change_summoned(
    me: Me, recipe: Recipe, writeback: bool, runs_before: bool
) -> tuple[Tensor, dict[str, Tensor]]:
    """A loss, and parameters, after each rank has filled all parameters with its number."""
    model = recipe.wrapped(me)
    if runs_before:
        with torch.no_grad():
            recipe.net.loss(model, 0, 0, me.device)  # the root may keep what it has gathered
    with type(model).summon_full_params(model, writeback=writeback), torch.no_grad():
        for param in model.parameters():
            param.fill_((me.rank + 1) * 0.125)
    with torch.no_grad():
        loss = recipe.net.loss(model, 0, 0, me.device)
    return loss, full_parameters(model)


def check_kept(ranks: Ranks, recipe: Recipe, runs_before: bool) -> None:
    """Parts of all ranks: what each one holds has its number."""
    got = ranks.run(change_summoned, recipe, True, runs_before)
    assert_same_on_all_ranks(got, what="parameters and loss")
    loss, params = got[0]
    seen = torch.cat([value.flatten() for value in params.values()]).unique().tolist()
    wanted = [(rank + 1) * 0.125 for rank in range(ranks.world_size)]
    words = f"{len(seen)} values, from {seen[0]} to {seen[-1]}; want {wanted}"
    assert_that(seen == wanted, f"the values differ from those written: {words}")
    bare = recipe.net.make()
    bare.load_state_dict(params, strict=False)
    want = recipe.net.loss(bare, 0, 0, CPU).detach()
    assert_near([loss], [Near.relative(want, 1e-9)], "loss afterwards")


def check_discarded(ranks: Ranks, recipe: Recipe, runs_before: bool) -> None:
    bare = recipe.net.make()
    want = recipe.net.loss(bare, 0, 0, CPU).detach()
    params = {name: param.detach() for name, param in bare.named_parameters()}
    for loss, mine in ranks.run(change_summoned, recipe, False, runs_before):
        check_tensors([mine], [params], within=0)
        assert_near([loss], [Near.relative(want, 1e-9)], "loss afterwards")


@chapter.must(
    "fsdp/summon-writes-back",
    "With writeback each rank keeps the changes to its own chunk, and the forward uses them.",
    source=f"{DOCS}, summon_full_params",
)
@world_sizes(2, 3)
@both_kinds
def test_changes_are_kept(ranks: Ranks, orig: bool) -> None:
    for strategy in STRATEGIES[:2]:
        check_kept(ranks, Recipe(strategy=strategy, orig=orig), False)


@chapter.must(
    "fsdp/summon-discards",
    "Without writeback, changes are lost, also for the next forward.",
    source=f"{DOCS}, summon_full_params",
)
@world_sizes(2, 3)
@both_kinds
def test_changes_are_discarded(ranks: Ranks, orig: bool) -> None:
    for strategy in STRATEGIES[:2]:
        check_discarded(ranks, Recipe(strategy=strategy, orig=orig), False)


@chapter.must(
    "fsdp/summon-after-forward",
    "Where a forward without gradients has left parameters unsharded, too, changes are kept with "
    "writeback, each rank's for its own chunk, and lost without it.",
    source="derived; torch 2.13 goes on with what each rank wrote for itself",
)
@world_sizes(2)
@both_kinds
def test_changes_of_what_is_unsharded(ranks: Ranks, orig: bool) -> None:
    for strategy in STRATEGIES[:2]:
        recipe = Recipe(strategy=strategy, orig=orig)
        check_discarded(ranks, recipe, True)
        check_kept(ranks, recipe, True)


def summoned_dimensions(me: Me, orig: bool, options: dict[str, bool]) -> int:
    """The most dimensions that any parameter has."""
    model = Recipe(orig=orig).wrapped(me)
    with type(model).summon_full_params(model, **options):
        most: int = max(param.dim() for param in model.parameters())
    return most


@chapter.must(
    "fsdp/summon-on-rank-0",
    "With rank0_only rank 0 sees full parameters, and the others their shards.",
    source=f"{DOCS}, summon_full_params",
)
@world_sizes(2, 3)
@both_kinds
def test_rank_0_alone_sees_parameters(ranks: Ranks, orig: bool) -> None:
    options = {"writeback": False, "rank0_only": True}
    first, *others = ranks.run(summoned_dimensions, orig, options)
    assert_that(first == 2, f"parameters of {first} dimensions", 0)
    for rank, most in enumerate(others, 1):
        assert_that(most == 1, f"parameters of {most} dimensions", rank)


def summoned_gradients(me: Me, recipe: Recipe) -> list[dict[str, Tensor]]:
    """Full gradients after a backward, and after they were doubled."""
    model = recipe.wrapped(me)
    recipe.net.loss(model, me.rank, 0, me.device).backward()
    found = []
    for _ in range(2):
        with type(model).summon_full_params(model, with_grads=True), torch.no_grad():
            grads = {name: param.grad for name, param in model.named_parameters()}
            found.append({n: g.clone() for n, g in grads.items() if g is not None})
            for grad in grads.values():
                if grad is not None:
                    grad.mul_(2)
    return found


@chapter.must(
    "fsdp/summon-gradients",
    "With with_grads, full gradients are shown, averaged over the ranks, and changes to them are "
    "kept.",
    source=f"{DOCS}, summon_full_params",
)
@world_sizes(2, 3)
def test_full_gradients(ranks: Ranks) -> None:
    want = mean_gradients(Net(), ranks.world_size)
    doubled = {name: 2 * grad for name, grad in want.items()}
    for strategy in STRATEGIES:
        for first, second in ranks.run(summoned_gradients, Recipe(strategy=strategy, orig=True)):
            check_tensors([first, second], [want, doubled])


def summon_the_root(me: Me) -> list[list[int]]:
    """Shapes of the head's weight and of a block's, with the root alone summoned."""
    model = Recipe(orig=True).wrapped(me)
    with type(model).summon_full_params(model, recurse=False):
        named = dict(model.named_parameters())
        block = next(p for name, p in named.items() if name.endswith("up.weight"))
        return [list(named["head.weight"].shape), list(block.shape)]


@chapter.must(
    "fsdp/summon-one-unit",
    "Without recurse only the instance's own parameters are shown in full.",
    source=f"{DOCS}, summon_full_params",
)
@world_sizes(2)
def test_one_unit_is_summoned(ranks: Ranks) -> None:
    for rank, (head, block) in enumerate(ranks.run(summon_the_root)):
        assert_that(head == [10, 5], f"the root's weight has shape {head}", rank)
        assert_that(len(block) == 1, f"a block's weight has shape {block}", rank)


def summon_refused(me: Me, options: dict[str, bool], strategy: str) -> None:
    model = wrap(me, linear(3, 2, 1), sharding_strategy=ShardingStrategy[strategy])
    with type(model).summon_full_params(model, **options):
        pass


@chapter.must(
    "fsdp/summon-refuses",
    "rank0_only with writeback, with_grads without original parameters, and offload_to_cpu of "
    "what is not sharded raise NotImplementedError 'is not supported'.",
    source="torch 2.13, _validate_unshard_params_args",
)
@world_sizes(2)
@pytest.mark.parametrize(
    ("options", "strategy"),
    [
        ({"rank0_only": True}, "FULL_SHARD"),
        ({"with_grads": True}, "FULL_SHARD"),
        ({"offload_to_cpu": True, "writeback": False}, "NO_SHARD"),
    ],
    ids=["rank0_only", "with_grads", "offload_to_cpu"],
)
def test_refused_combinations(ranks: Ranks, options: dict[str, bool], strategy: str) -> None:
    outcomes = ranks.outcomes(summon_refused, options, strategy)
    assert_raised(outcomes, NotImplementedError, match="is not supported")


class Nosy(nn.Linear):
    """Asks for full parameters in its forward."""

    model: Any

    def forward(self, x: Tensor) -> Tensor:
        model = self.model()
        with type(model).summon_full_params(model):
            return super().forward(x)


def summon_in_forward(me: Me) -> None:
    nosy = Nosy(3, 2)
    model = wrap(me, nosy)
    nosy.model = lambda: model
    try:
        with torch.no_grad():
            model(torch.ones(1, 3, device=me.device))
    finally:
        del nosy.model


@chapter.must(
    "fsdp/summon-in-forward",
    "summon_full_params inside a forward raises AssertionError 'Cannot manually unshard "
    "parameters during forward/backward'.",
    source="torch 2.13, _unshard_params",
)
@world_sizes(2)
def test_in_a_forward(ranks: Ranks) -> None:
    words = "Cannot manually unshard parameters during forward/backward"
    assert_raised(ranks.outcomes(summon_in_forward), AssertionError, match=words)


def summon_in_itself(me: Me) -> None:
    model = wrap(me, linear(3, 2, 1))
    cls = type(model)
    with cls.summon_full_params(model), cls.summon_full_params(model):
        pass


@chapter.must(
    "fsdp/summon-twice",
    "summon_full_params inside itself raises AssertionError 'Cannot manually unshard parameters "
    "when already unsharding parameters'.",
    source="torch 2.13, _unshard_params",
)
@world_sizes(2)
def test_twice(ranks: Ranks) -> None:
    words = "Cannot manually unshard parameters when already unsharding parameters"
    assert_raised(ranks.outcomes(summon_in_itself), AssertionError, match=words)


def fill_by_apply(me: Me, orig: bool) -> tuple[int, dict[str, Tensor]]:
    """How many layers a function was given, each of which it fills with its size."""
    model = Recipe(orig=orig).wrapped(me)
    count = 0

    def fill(module: nn.Module) -> None:
        nonlocal count
        if isinstance(module, nn.Linear):
            count += 1
            with torch.no_grad():
                module.weight.fill_(module.weight.numel())

    model.apply(fill)
    return count, full_parameters(model)


@chapter.must(
    "fsdp/apply",
    "apply passes each module to the function once, with its parameters in full, and keeps the "
    "changes that the function makes to them.",
    source=f"{DOCS}, apply",
)
@world_sizes(1, 2, 3)
@both_kinds
def test_applying_a_function(ranks: Ranks, orig: bool) -> None:
    for rank, (count, params) in enumerate(ranks.run(fill_by_apply, orig)):
        assert_that(count == 5, f"the function saw {count} layers", rank)
        for name in ("head.weight", "blocks.0.up.weight", "blocks.1.down.weight"):
            value = params[name]
            right = bool((value == value.numel()).all())
            assert_that(right, f"{name} is not filled with {value.numel()}", rank)


# Norms


def norms(
    me: Me, recipe: Recipe, kinds: list[float], limit: float, hybrid: bool = False
) -> list[Tensor]:
    """The norm of each kind that clip_grad_norm_ returns, one after the other."""
    kwargs: dict[str, Any] = {"process_group": halves(me)} if hybrid else {}
    model = recipe.wrapped(me, **kwargs)
    recipe.net.loss(model, me.rank, 0, me.device).backward()
    return [model.clip_grad_norm_(limit, kind) for kind in kinds]


def check_norms(ranks: Ranks, recipe: Recipe, hybrid: bool = False, within: float = 1e-5) -> None:
    kinds = [2.0, 1.0, float("inf")]
    grads = list(mean_gradients(recipe.net, ranks.world_size).values())
    want = [nn.utils.get_total_norm(grads, kind) for kind in kinds]
    for mine in ranks.run(norms, recipe, kinds, 1e9, hybrid):
        near = [Near.relative(norm, within) for norm in want]
        assert_near(mine, near, "norms 2, 1 and infinity, as if of three ranks")


@chapter.must(
    "fsdp/norm",
    "clip_grad_norm_ returns the norm of all ranks' shards together, for norms 1, 2 and "
    "infinity, and with every strategy.",
    source=f"{DOCS}, clip_grad_norm_; RLinf#1558",
)
@world_sizes(1, 2, 3)
@both_kinds
def test_norms(ranks: Ranks, orig: bool) -> None:
    for strategy in STRATEGIES:
        check_norms(ranks, Recipe(Net(dtype="float32"), strategy=strategy, orig=orig))


@chapter.must(
    "fsdp/norm-of-doubles",
    "Gradients in float64 have a norm in float64.",
    source="derived: what is documented has no restriction; torch 2.13 computes in float32",
)
@world_sizes(2)
def test_norms_of_doubles(ranks: Ranks) -> None:
    check_norms(ranks, Recipe(), within=1e-12)


@chapter.must(
    "fsdp/norm-hybrid",
    "With hybrid sharding the norm counts each element once, not once per replica.",
    source="VeOmni#184",
)
@world_sizes(4)
def test_norms_of_hybrid_sharding(ranks: Ranks) -> None:
    for strategy in HYBRIDS:
        check_norms(ranks, Recipe(Net(dtype="float32"), strategy=strategy), True)


@chapter.must(
    "fsdp/norm-clips",
    "Gradients whose norm is above the maximum are scaled down to it, and others do not change.",
    source=f"{DOCS}, clip_grad_norm_",
)
@world_sizes(2, 3)
@both_kinds
def test_clipping(ranks: Ranks, orig: bool) -> None:
    """Above the maximum once, then below it."""
    net = Net(dtype="float32")
    grads = list(mean_gradients(net, ranks.world_size).values())
    whole = nn.utils.get_total_norm(grads)
    limit = whole.item() / 4
    for strategy in STRATEGIES:
        recipe = Recipe(net, strategy=strategy, orig=orig)
        for first, second in ranks.run(norms, recipe, [2.0, 2.0], limit):
            wanted = [Near.relative(n, 1e-4) for n in (whole, whole / 4)]
            assert_near([first, second], wanted, "norms before and after clipping")


class HalfFrozen(nn.Module):
    """On two ranks, with original parameters, the second one holds only what is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.trained = nn.Parameter(torch.ones(4))
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return (self.trained * x + 0 * self.frozen).sum()


def norms_without_gradients(me: Me) -> list[float]:
    """The maximum norms of two steps, the second one smaller; then norm 2."""
    model = wrap(me, HalfFrozen(), use_orig_params=True)
    found = []
    for size, kind in ((5.0, float("inf")), (1.0, float("inf")), (1.0, 2.0)):
        model(torch.full((4,), size, device=me.device)).backward()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a rank says that it has no gradients
            found.append(model.clip_grad_norm_(1e9, kind).item())
        model.zero_grad()
    return found


@chapter.must(
    "fsdp/norm-without-gradients",
    "The norm is also right where a rank has no gradients at all.",
    source="derived; torch 2.13 begins a maximum with what is not a number of its own",
)
@world_sizes(2)
def test_norms_where_a_rank_has_no_gradients(ranks: Ranks) -> None:
    assert_same_on_all_ranks(ranks.run(norms_without_gradients), [5.0, 1.0, 2.0], what="norms")


def inner_unit(me: Me) -> Any:
    model = Recipe().wrapped(me)
    Net().loss(model, me.rank, 0, me.device).backward()
    return type(model).fsdp_modules(model)[1]


def clip_inner(me: Me) -> None:
    inner_unit(me).clip_grad_norm_(1.0)


def no_sync_inner(me: Me) -> None:
    with inner_unit(me).no_sync():
        pass


@chapter.must(
    "fsdp/norm-of-inner-unit",
    "clip_grad_norm_ on an inner instance raises RuntimeError 'should only be called on the "
    "root FSDP instance'.",
    source="torch 2.13, clip_grad_norm_",
)
@world_sizes(2)
def test_norm_of_an_inner_unit(ranks: Ranks) -> None:
    words = "should only be called on the root FSDP instance"
    assert_raised(ranks.outcomes(clip_inner), RuntimeError, match=words)


@chapter.must(
    "fsdp/no-sync-of-inner-unit",
    "no_sync on an inner instance raises RuntimeError '`no_sync()` on inner FSDP instances is "
    "not supported'.",
    source="torch 2.13, no_sync",
)
@world_sizes(2)
def test_no_sync_of_an_inner_unit(ranks: Ranks) -> None:
    words = r"`no_sync\(\)` on inner FSDP instances is not supported"
    assert_raised(ranks.outcomes(no_sync_inner), RuntimeError, match=words)


# Accumulation


@chapter.must(
    "fsdp/no-sync",
    "Gradients that accumulate under no_sync, and those of the synchronized backward after it, "
    "add up to the mean over all ranks, with every strategy.",
    source=f"{DOCS}, no_sync",
)
@world_sizes(2, 3)
def test_accumulating_without_synchronizing(ranks: Ranks) -> None:
    for strategy in STRATEGIES:
        check_training(ranks, Recipe(strategy=strategy, micro_batches=3, no_sync=True))


@chapter.must(
    "fsdp/no-sync-original-parameters",
    "With use_orig_params=True, no_sync accumulates as well, and the optimizer finds gradients "
    "of its parameters' shapes.",
    source="pytorch#90546 and pytorch#100180",
)
@world_sizes(2, 3)
def test_accumulating_original_parameters(ranks: Ranks) -> None:
    for strategy in STRATEGIES:
        check_training(ranks, Recipe(strategy=strategy, orig=True, micro_batches=3, no_sync=True))


@chapter.must(
    "fsdp/no-sync-hybrid",
    "With hybrid sharding, the gradients that several backwards accumulate, under no_sync or "
    "not, are averaged over the replicas too.",
    source="derived: each microbatch has to get into the all-reduce",
)
@world_sizes(4)
@pytest.mark.parametrize("no_sync", [False, True], ids=["synchronized", "no_sync"])
def test_accumulating_in_replicas(ranks: Ranks, no_sync: bool) -> None:
    for strategy in HYBRIDS:
        recipe = Recipe(strategy=strategy, micro_batches=2, no_sync=no_sync, steps=2)
        check_runs(ranks.run(train_in_halves, recipe), train_whole(recipe, 4))


def accumulate_then_leave_out(me: Me, orig: bool) -> dict[str, Tensor]:
    """Parameters after a step of SGD on what no_sync accumulated, and one branch once more."""

    def unit(module: nn.Module) -> Any:
        return wrap(me, module, use_orig_params=orig)

    model = branches(unit)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accumulate(model, me.rank, me.device, 1.0, model.no_sync)
    optimizer.step()
    return full_parameters(model)


def accumulate(model: Any, rank: int, device: torch.device, scale: float, waits: Any) -> None:
    with waits():
        used, optional = model(inputs(rank, 0).to(device))
        (scale * (used.pow(2).sum() + optional.pow(2).sum())).backward()
    used, _ = model(inputs(rank, 1).to(device))
    (scale * used.pow(2).sum()).backward()


@chapter.must(
    "fsdp/no-sync-then-unused",
    "The gradients that a unit accumulated under no_sync are reduced by the next synchronized "
    "backward, even if that backward does not reach the unit.",
    source="derived; torch 2.13 raises",
)
@world_sizes(2)
@both_kinds
def test_accumulating_and_then_not_used(ranks: Ranks, orig: bool) -> None:
    bare = branches(lambda module: module)
    for rank in range(ranks.world_size):
        accumulate(bare, rank, CPU, 1 / ranks.world_size, contextlib.nullcontext)
    torch.optim.SGD(bare.parameters(), lr=0.1).step()
    want = {name: param.detach() for name, param in bare.named_parameters()}
    check_tensors(ranks.run(accumulate_then_leave_out, orig), [want] * ranks.world_size)


class Gain(nn.Module):
    """One element."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return (self.gain * x).sum()


def accumulate_one_element(me: Me) -> float:
    """The gradient's sum over all ranks after two backwards."""
    model = wrap(me, Gain())
    for _ in range(2):
        model(torch.ones(1, device=me.device)).backward()
    total = torch.zeros(1, device=me.device)
    for param in model.parameters():
        if param.grad is not None and me.rank == 0:
            total += param.grad.sum()
    dist.all_reduce(total)
    return total.item()


@chapter.must(
    "fsdp/one-element-accumulates",
    "Gradients of a unit of one element accumulate like others, although its chunk has the size "
    "of the whole.",
    source="derived; torch 2.13 takes one for the other by the size",
)
@world_sizes(2, 3)
def test_one_element(ranks: Ranks) -> None:
    assert_same_on_all_ranks(ranks.run(accumulate_one_element), 2.0, what="gradient")

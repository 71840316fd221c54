"""FSDP's summon_full_params and apply: full parameters and gradients, changes kept or discarded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import ShardingStrategy

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
from conformance.spec.fsdp.small_models import two_layers
from conformance.spec.fsdp.training_runs import (
    CPU,
    STRATEGIES,
    Recipe,
    both_kinds,
    check_tensors,
    full_parameters,
    mean_gradients,
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


def summoned_again(me: Me) -> dict[str, Tensor]:
    """Full parameters of a root that has none of its own, after they were summoned before."""
    model = two_layers(lambda module: wrap(me, module))
    for _ in range(2):
        full_parameters(model)
    with torch.no_grad():
        model(inputs(me.rank, 0).to(me.device))
    return full_parameters(model)


@covers("fsdp/summon")
@world_sizes(2)
def test_what_is_summoned_again(ranks: Ranks) -> None:
    whole = two_layers(lambda module: module)
    want = {name: param.detach() for name, param in whole.named_parameters()}
    check_tensors(ranks.run(summoned_again), [want] * 2)


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


def gradients_left(me: Me, recipe: Recipe) -> tuple[list[Tensor], list[str]]:
    """Local gradients after changes without writeback; names of gradients after zero_grad."""
    model = recipe.wrapped(me)
    recipe.net.loss(model, me.rank, 0, me.device).backward()
    cls = type(model)
    with cls.summon_full_params(model, writeback=False, with_grads=True), torch.no_grad():
        for param in model.parameters():
            if param.grad is not None:
                param.grad.fill_(9.0)
    kept = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    with cls.summon_full_params(model, with_grads=True):
        shown = [name for name, param in model.named_parameters() if param.grad is not None]
    return kept, shown


@covers("fsdp/summon-gradients")
@world_sizes(2)
def test_changes_of_gradients_are_discarded_without_writeback(ranks: Ranks) -> None:
    for rank, (kept, shown) in enumerate(ranks.run(gradients_left, Recipe(orig=True))):
        changed = sum(bool((grad == 9.0).any()) for grad in kept)
        assert_that(bool(kept) and not changed, f"{changed} of {len(kept)} have changed", rank)
        assert_that(not shown, f"after zero_grad, gradients of {shown}", rank)


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


def wrap_after_apply(me: Me) -> Tensor:
    """What a model gives of which one unit was there, and had run `apply`, before the root."""
    inner = wrap(me, linear(2, 2, 1).to(me.device))
    inner.apply(lambda module: None)
    model = wrap(me, nn.Sequential(inner, linear(2, 2, 2).to(me.device)))
    x = torch.ones(1, 2, dtype=torch.float64, device=me.device)
    output: Tensor = model(x)
    output.sum().backward()
    return output.detach()


@covers("fsdp/apply")
@world_sizes(2)
def test_a_unit_may_get_a_root_after_apply(ranks: Ranks) -> None:
    bare = nn.Sequential(linear(2, 2, 1), linear(2, 2, 2))
    want = Near.relative(bare(torch.ones(1, 2, dtype=torch.float64)).detach(), 1e-9)
    assert_near(ranks.run(wrap_after_apply), [want] * ranks.world_size, "output")

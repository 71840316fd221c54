"""FSDP passes in unusual orders: reused, unused or recomputed units, evaluation, small groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy

from conformance import (
    Chapter,
    Me,
    Ranks,
    assert_same_on_all_ranks,
    assert_that,
    covers,
    world_sizes,
)
from conformance.harness.traces import Issued, record
from conformance.spec.fsdp.custom import (
    Unit,
    check_custom,
    inputs,
    linear,
    train_custom,
    train_custom_whole,
)
from conformance.spec.fsdp.models import Net
from conformance.spec.fsdp.small_models import (
    branches,
    loss_of_one_branch,
    one_pass,
    two_layers,
    two_layers_from,
    wanted_of_part,
)
from conformance.spec.fsdp.training_runs import (
    STRATEGIES,
    Recipe,
    Run,
    both_kinds,
    check_runs,
    check_tensors,
    full_parameters,
    train_step,
    train_whole,
    wrap,
)

DOCS = "torch 2.13 docs, FullyShardedDataParallel"

chapter = Chapter("fsdp")


class Twice(nn.Module):
    """One layer that is used twice in a forward, with another one in between."""

    def __init__(self, layer: Any, between: Any) -> None:
        super().__init__()
        self.layer, self.between = layer, between

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(torch.tanh(self.between(self.layer(x))))
        return out


def layer_used_twice(unit: Unit) -> Any:
    return unit(Twice(unit(linear(3, 3, 1)), unit(linear(3, 3, 2))))


@chapter.must(
    "fsdp/same-unit-twice",
    "A unit that runs twice in one forward is reduced once, with the gradients of both runs.",
    source="fairscale#513",
)
@world_sizes(2, 3)
@both_kinds
def test_a_unit_that_runs_twice(ranks: Ranks, orig: bool) -> None:
    for strategy in STRATEGIES:
        check_custom(ranks, layer_used_twice, one_pass, strategy, orig)


@chapter.must(
    "fsdp/unused-unit",
    "A unit whose output is not in the loss does not affect the training of the others, in this "
    "iteration or later.",
    source="pytorch#83129 and pytorch#83195",
)
@world_sizes(2, 3)
@both_kinds
def test_a_unit_that_is_not_in_every_loss(ranks: Ranks, orig: bool) -> None:
    for strategy in STRATEGIES[:2]:
        check_custom(ranks, branches, loss_of_one_branch, strategy, orig, steps=4)


@chapter.must(
    "fsdp/unused-replicated-unit",
    "With NO_SHARD, too, a unit whose output is not in the loss does not affect training.",
    source="derived; with original parameters torch 2.13 loses sight of the unit's parameters",
)
@world_sizes(2)
@both_kinds
def test_a_replicated_unit_that_is_not_in_every_loss(ranks: Ranks, orig: bool) -> None:
    check_custom(ranks, branches, loss_of_one_branch, "NO_SHARD", orig, steps=4)


def dropping(model: Any, rank: int, step: int, device: torch.device, scale: float) -> list[Tensor]:
    """A forward whose result is dropped comes before each step's."""
    model(inputs(rank, 50 + step).to(device))
    return one_pass(model, rank, step, device, scale)


@chapter.must(
    "fsdp/dropped-forward",
    "A forward whose result is dropped does not affect the next iteration.",
    source="derived",
)
@world_sizes(2)
@both_kinds
def test_a_forward_whose_result_is_dropped(ranks: Ranks, orig: bool) -> None:
    for strategy in STRATEGIES:
        check_custom(ranks, layer_used_twice, dropping, strategy, orig)


def frozen_between(unit: Unit) -> Any:
    return unit(Twice(unit(linear(3, 3, 1)), unit(linear(3, 3, 2).requires_grad_(False))))


@chapter.must(
    "fsdp/dropped-forward-of-a-frozen-unit",
    "A frozen unit keeps its parameters and their values after a forward whose result is dropped.",
    source="derived; with NO_SHARD and original parameters torch 2.13 loses sight of them",
    rests_on="fsdp/dropped-forward",
)
@world_sizes(2)
@both_kinds
def test_a_dropped_forward_of_a_frozen_unit(ranks: Ranks, orig: bool) -> None:
    for strategy in STRATEGIES:
        check_custom(ranks, frozen_between, dropping, strategy, orig)


@chapter.must(
    "fsdp/dropped-low-precision-forward",
    "With a param_dtype, too, a forward whose result is dropped does not affect the next "
    "iteration.",
    source="derived; torch 2.13 loses the gradient",
)
@world_sizes(2)
@both_kinds
def test_a_dropped_forward_in_low_precision(ranks: Ranks, orig: bool) -> None:
    """Parameters are float64, computation is in float32."""
    low = {"mixed_precision": MixedPrecision(param_dtype=torch.float32)}
    got = ranks.run(train_custom, layer_used_twice, dropping, "FULL_SHARD", orig, 3, low)
    want = train_custom_whole(layer_used_twice, one_pass, ranks.world_size)
    check_tensors([run.params for run in got], [run.params for run in want], within=1e-5)


def evaluate_between_steps(me: Me, recipe: Recipe) -> list[Tensor]:
    """Losses of evaluation, before and after each step."""
    model = recipe.wrapped(me)
    optimizer = recipe.optimizer_of(model)
    seen = []
    for step in range(recipe.steps):
        recipe.net.loss(model, me.rank, step, me.device).backward()
        for _ in range(2):
            with torch.no_grad():
                seen.append(recipe.net.loss(model, me.rank, step, me.device))
            optimizer.step()
        optimizer.zero_grad()
    return seen


@chapter.must(
    "fsdp/step-after-eval",
    "A forward without gradients sees every optimizer step before it.",
    source="derived; torch 2.13 computes with what an earlier one has gathered",
)
@world_sizes(2)
@both_kinds
def test_evaluation_sees_every_step(ranks: Ranks, orig: bool) -> None:
    recipe = Recipe(orig=orig)
    bare = recipe.net.make()
    optimizer = recipe.optimizer_of(bare)
    n, cpu = ranks.world_size, torch.device("cpu")
    want: list[list[Tensor]] = [[] for _ in range(n)]
    for step in range(recipe.steps):
        for rank in range(n):
            (recipe.net.loss(bare, rank, step, cpu) / n).backward()
        for _ in range(2):
            with torch.no_grad():
                for rank, mine in enumerate(want):
                    mine.append(recipe.net.loss(bare, rank, step, cpu))
            optimizer.step()
        optimizer.zero_grad()
    for strategy in STRATEGIES:
        got = ranks.run(evaluate_between_steps, Recipe(strategy=strategy, orig=orig))
        check_runs([Run(mine, {}) for mine in got], [Run(mine, {}) for mine in want])


def evaluate(me: Me, recipe: Recipe) -> list[Tensor]:
    """Losses of three evaluations."""
    model = recipe.wrapped(me).eval()
    with torch.no_grad():
        return [recipe.net.loss(model, me.rank, number, me.device) for number in (0, 1, 0)]


@chapter.must(
    "fsdp/eval",
    "In eval mode without gradients every strategy gives the bare module's output, again and "
    "again.",
    source=DOCS,
)
@world_sizes(1, 2, 3)
def test_eval_mode(ranks: Ranks) -> None:
    recipe = Recipe()
    bare = recipe.net.make().eval()
    with torch.no_grad():
        want = [
            [recipe.net.loss(bare, rank, number, torch.device("cpu")) for number in (0, 1, 0)]
            for rank in range(ranks.world_size)
        ]
    for strategy in STRATEGIES:
        got = ranks.run(evaluate, Recipe(strategy=strategy))
        check_runs([Run(mine, {}) for mine in got], [Run(mine, {}) for mine in want])


def train_checkpointed(me: Me, recipe: Recipe, reentrant: bool, outside: bool) -> Run:
    """Blocks recompute their activations; FSDP wraps what recomputes, or is inside of it."""
    kind = CheckpointImpl.REENTRANT if reentrant else CheckpointImpl.NO_REENTRANT
    network = recipe.net.make()

    def unit(module: nn.Module) -> Any:
        return wrap(
            me,
            module,
            use_orig_params=recipe.orig,
            sharding_strategy=ShardingStrategy[recipe.strategy],
        )

    network.blocks = nn.ModuleList(
        checkpoint_wrapper(unit(block), kind) if outside else unit(checkpoint_wrapper(block, kind))
        for block in network.blocks
    )
    model = wrap(
        me,
        network,
        use_orig_params=recipe.orig,
        sharding_strategy=ShardingStrategy[recipe.strategy],
    )
    optimizer = recipe.optimizer_of(model)
    losses = []
    for step in range(recipe.steps):
        losses += train_step(me, recipe, model, optimizer, step)
    params = full_parameters(model)
    return Run(losses, {k.replace("_checkpoint_wrapped_module.", ""): params[k] for k in params})


@chapter.must(
    "fsdp/checkpointed",
    "Units whose activations are recomputed in the backward train like the bare module, "
    "reentrant or not.",
    source="torch 2.13, checkpoint_wrapper; Megatron-LM#6153",
)
@world_sizes(2)
@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
@both_kinds
def test_checkpointed_units(ranks: Ranks, reentrant: bool, orig: bool) -> None:
    want = train_whole(Recipe(), ranks.world_size)
    for strategy in STRATEGIES:
        recipe = Recipe(strategy=strategy, orig=orig)
        check_runs(ranks.run(train_checkpointed, recipe, reentrant, False), want)


@chapter.must(
    "fsdp/recomputed-units",
    "Units whose own forward is run again in the backward, because of a checkpoint around them, "
    "train like the bare module.",
    source="torch 2.13, _pre_forward: what is recomputed is unsharded; Megatron-LM#6153",
    needs="device:autocast",
)
@world_sizes(2)
@both_kinds
def test_recomputed_units(ranks: Ranks, orig: bool) -> None:
    want = train_whole(Recipe(), ranks.world_size)
    for strategy in STRATEGIES[:2]:
        recipe = Recipe(strategy=strategy, orig=orig)
        check_runs(ranks.run(train_checkpointed, recipe, False, True), want)


def step_in_backward(
    me: Me, strategy: str, rates: Sequence[float]
) -> tuple[list[str], dict[str, Tensor]]:
    """Which parameters still have a gradient after a backward; then parameters in full.

    rates: of the optimizers of each parameter.
    """
    net = Net()
    recipe = Recipe(net, strategy=strategy, orig=True)
    model = recipe.wrapped(me)
    for param in model.parameters():
        param._in_backward_optimizers = [torch.optim.SGD([param], lr=rate) for rate in rates]
    left = []
    for step in range(2):
        net.loss(model, me.rank, step, me.device).backward()
        left += [name for name, param in model.named_parameters() if param.grad is not None]
    return left, full_parameters(model)


@chapter.must(
    "fsdp/optimizer-in-backward",
    "Optimizers attached to original parameters step on averaged gradients during the backward, "
    "and leave no gradients.",
    source="torch 2.13, _post_backward_hook, _in_backward_optimizers",
)
@world_sizes(2, 3)
@pytest.mark.parametrize("rates", [[0.1], [0.02, 0.08]], ids=["one", "two"])
def test_optimizers_in_the_backward(ranks: Ranks, rates: list[float]) -> None:
    """Two plain steps on one gradient are one step with the sum of their rates."""
    bare = Net().make()
    n = ranks.world_size
    for step in range(2):
        bare.zero_grad()
        for rank in range(n):
            (Net().loss(bare, rank, step, torch.device("cpu")) / n).backward()
        with torch.no_grad():
            for param in bare.parameters():
                assert param.grad is not None
                param.sub_(0.1 * param.grad)
    want = {name: param.detach() for name, param in bare.named_parameters()}
    for strategy in STRATEGIES[:2]:
        got = ranks.run(step_in_backward, strategy, rates)
        assert_same_on_all_ranks([left for left, _ in got], [], what="parameters with gradients")
        check_tensors([params for _, params in got], [want] * n)


class Moody(nn.Linear):
    """A layer that may refuse to run."""

    refuses = False

    def forward(self, x: Tensor) -> Tensor:
        if self.refuses:
            raise KeyError("not today")
        return super().forward(x)


def refuse_once(me: Me, strategy: str, orig: bool, with_grad: bool) -> tuple[list[int], Run]:
    """A forward that raises in an inner unit between two steps of training."""
    moody = Moody(3, 3)
    keys = []

    def passes(
        model: Any, rank: int, step: int, device: torch.device, scale: float
    ) -> list[Tensor]:
        moody.refuses = True
        try:
            with torch.set_grad_enabled(with_grad):
                model(inputs(rank, step).to(device))
        except KeyError:
            keys.append(len(model.state_dict()))
        moody.refuses = False
        return one_pass(model, rank, step, device, scale)

    run = train_custom(me, two_layers_from(moody), passes, strategy, orig)
    return keys, run


@chapter.must(
    "fsdp/forward-that-raises",
    "After a forward that raised, the model can be saved and trained as before.",
    source="derived",
)
@world_sizes(2)
@both_kinds
@pytest.mark.parametrize("with_grad", [False, True], ids=["no-grad", "grad"])
def test_a_forward_that_raises(ranks: Ranks, orig: bool, with_grad: bool) -> None:
    want = train_custom_whole(two_layers, one_pass, ranks.world_size)
    for strategy in STRATEGIES:
        got = ranks.run(refuse_once, strategy, orig, with_grad)
        counts = [keys for keys, _ in got]
        assert_same_on_all_ranks(counts, [4] * 3, what="entries of state dicts")
        check_runs([run for _, run in got], want)


def train_in_parts(me: Me, parts: list[list[int]]) -> Run | None:
    """Train in the group that this rank is in, if there is one."""
    groups = [dist.new_group(part) for part in parts]
    for part, group in zip(parts, groups, strict=True):
        if me.rank in part:
            return train_custom(me, two_layers, one_pass, kwargs={"process_group": group})
    return None


@chapter.must(
    "fsdp/process-group",
    "With a process_group, only the ranks of that group share parameters and gradients.",
    source=f"{DOCS}, process_group",
)
@world_sizes(3, 4)
def test_groups_train_apart(ranks: Ranks) -> None:
    """The last two ranks are a group, and all other ranks another one."""
    n = ranks.world_size
    parts = [list(range(n - 2)), [n - 2, n - 1]]
    got = ranks.run(train_in_parts, parts)
    for part in parts:
        want = wanted_of_part(part)
        check_runs([got[rank] for rank in part], want)


def train_replicas_in_a_part(me: Me, part: list[int]) -> Run | None:
    """Shards over the part, and one replica of it; the other ranks only make the groups."""
    groups = [dist.new_group(part), *(dist.new_group([rank]) for rank in range(me.world_size))]
    if me.rank not in part:
        return None
    pair = groups[0], groups[1 + me.rank]
    return train_custom(me, two_layers, one_pass, "HYBRID_SHARD", kwargs={"process_group": pair})


@covers("fsdp/process-group")
@world_sizes(3)
def test_replicas_of_some_ranks(ranks: Ranks) -> None:
    part = [0, 1]
    got = ranks.run(train_replicas_in_a_part, part)
    check_runs([got[rank] for rank in part], wanted_of_part(part))


def train_alone(me: Me, strategy: str) -> tuple[Run, str, list[Issued]]:
    """Train in a group of this rank alone; the strategy in use, and what was issued."""
    groups = [record([rank]) for rank in range(me.world_size)]
    group = groups[me.rank]
    module = linear(3, 3, 1)
    model = wrap(me, module, process_group=group, sharding_strategy=ShardingStrategy[strategy])
    name = model.sharding_strategy.name
    group.take()
    run = train_custom(me, two_layers, one_pass, strategy, kwargs={"process_group": group})
    return run, name, [i for i in group.take() if i.operation != "all_reduce"]


@chapter.must(
    "fsdp/alone",
    "In a group of one rank the strategy is NO_SHARD, whatever was requested, and training "
    "exchanges nothing.",
    source="torch 2.13, _init_core_state: FSDP is switching to use NO_SHARD",
)
@world_sizes(1, 2)
def test_a_group_of_one(ranks: Ranks) -> None:
    got = ranks.run(train_alone, "FULL_SHARD")
    check_runs(
        [run for run, _, _ in got],
        [wanted_of_part([rank])[0] for rank in range(ranks.world_size)],
    )
    assert_same_on_all_ranks([name for _, name, _ in got], "NO_SHARD", what="strategy")
    for rank, (_, _, trace) in enumerate(got):
        assert_that(not trace, f"issued {', '.join(map(str, trace))}", rank)


def train_single_ranks(me: Me) -> Run:
    """Hybrid sharding in which every rank is a group of its own, replicated over all."""
    groups = [dist.new_group([rank]) for rank in range(me.world_size)]
    everybody = dist.new_group(list(range(me.world_size)))
    kwargs = {"process_group": (groups[me.rank], everybody)}
    return train_custom(me, two_layers, one_pass, "HYBRID_SHARD", kwargs=kwargs)


@chapter.must(
    "fsdp/hybrid-of-single-ranks",
    "Hybrid sharding over groups of one rank averages gradients over the replicas.",
    source="derived; torch 2.13 averages over the one rank, so replicas drift apart",
)
@world_sizes(2, 3)
def test_replicas_of_single_ranks(ranks: Ranks) -> None:
    check_runs(
        ranks.run(train_single_ranks), train_custom_whole(two_layers, one_pass, ranks.world_size)
    )

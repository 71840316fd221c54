"""FSDP after evaluation, freezing, dtype changes and other events between passes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy

from conformance import Chapter, Me, Ranks, assert_same_on_all_ranks, assert_that, world_sizes
from conformance.oracle.near import Near
from conformance.spec.fsdp.custom import Unit, inputs, linear, train_custom, train_custom_whole
from conformance.spec.fsdp.small_models import (
    branches,
    loss_of_one_branch,
    one_pass,
    three_layers,
    two_layers,
)
from conformance.spec.fsdp.state_dict_kinds import FULL, ON_DEVICE, loadable, saved
from conformance.spec.fsdp.training_runs import (
    CPU,
    STRATEGIES,
    both_kinds,
    check_runs,
    check_tensors,
    full_parameters,
    wrap,
)
from conformance.spec.tolerance import assert_near

chapter = Chapter("fsdp")


def no_sync_twice(me: Me, orig: bool) -> list[int]:
    """Elements of all gradients after a backward in two contexts, in one, and in none."""
    model = wrap(me, three_layers(lambda module: module), use_orig_params=orig)
    sizes: list[int] = []

    def go_backward() -> None:
        model(inputs(me.rank, len(sizes)).to(me.device)).sum().backward()
        sizes.append(sum(p.grad.numel() for p in model.parameters() if p.grad is not None))

    with model.no_sync():
        with model.no_sync():
            go_backward()
        go_backward()
    go_backward()
    return sizes


@chapter.must(
    "fsdp/no-sync-in-no-sync",
    "The end of an inner no_sync does not end the outer one.",
    source="torch 2.13, no_sync puts back what it has found",
)
@world_sizes(2, 3)
@both_kinds
def test_no_sync_within_itself(ranks: Ranks, orig: bool) -> None:
    for rank, (inside, between, outside) in enumerate(ranks.run(no_sync_twice, orig)):
        words = f"elements of gradients: {inside}, {between}, then {outside}"
        assert_that(inside == between > outside, words, rank)


def gradients(model: nn.Module, device: torch.device) -> dict[str, Tensor]:
    """Of the parameters that have one."""
    if device.type != "cpu":
        torch.accelerator.synchronize()
    leaves = [(name, param) for name, param in model.named_parameters() if param.is_leaf]
    return {name: param.grad.clone() for name, param in leaves if param.grad is not None}


def look_during_backward(
    me: Me, strategy: str, orig: bool
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The gradients when a backward has come to the model's input, and those after it."""

    def unit(module: nn.Module) -> Any:
        return wrap(me, module, sharding_strategy=ShardingStrategy[strategy], use_orig_params=orig)

    model = three_layers(unit)
    x = inputs(me.rank, 0).to(me.device).requires_grad_()
    seen: dict[str, Tensor] = {}
    x.register_hook(lambda _: seen.update(gradients(model, me.device)))
    model(x).pow(2).sum().backward()
    return seen, gradients(model, me.device)


@chapter.must(
    "fsdp/gradients-during-a-backward",
    "While a backward runs, the gradient of a sharded parameter is None or the mean over all "
    "ranks, and never one that is still being reduced.",
    source="derived: an optimizer may step after an error; torch 2.13 shows what is reduced",
)
@world_sizes(3)
@both_kinds
def test_gradients_during_a_backward(ranks: Ranks, orig: bool) -> None:
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP"):
        for rank, (seen, want) in enumerate(ranks.run(look_during_backward, strategy, orig)):
            for name, grad in seen.items():
                near = Near.relative(want[name], 1e-9)
                assert_near([grad], [near], f"gradient of {name}", [rank])


# Evaluation


def in_eval_mode(
    model: Any, rank: int, step: int, device: torch.device, scale: float
) -> list[Tensor]:
    model.eval()
    return one_pass(model, rank, step, device, scale)


@chapter.must(
    "fsdp/training-in-eval-mode",
    "In eval mode, too, a backward reduces gradients, and training is the same as the bare "
    "module's.",
    source="derived: the mode says how layers compute, not whether gradients are wanted",
)
@world_sizes(2)
@both_kinds
def test_training_in_eval_mode(ranks: Ranks, orig: bool) -> None:
    want = train_custom_whole(three_layers, one_pass, ranks.world_size)
    for strategy in STRATEGIES:
        check_runs(ranks.run(train_custom, three_layers, in_eval_mode, strategy, orig), want)


def evaluating_first(
    model: Any, rank: int, step: int, device: torch.device, scale: float
) -> list[Tensor]:
    """Between a forward and its backward, another batch is evaluated."""
    loss = model(inputs(rank, step).to(device)).pow(2).sum()
    with torch.no_grad():
        other = model(inputs(rank, 50 + step).to(device)).pow(2).sum()
    (scale * loss).backward()
    return [loss, other]


@chapter.must(
    "fsdp/eval-before-backward",
    "A forward without gradients between a forward and its backward does not change the gradients.",
    source="derived: so it is for the bare module",
)
@world_sizes(2)
@both_kinds
def test_evaluation_before_the_backward(ranks: Ranks, orig: bool) -> None:
    want = train_custom_whole(three_layers, evaluating_first, ranks.world_size)
    for strategy in STRATEGIES:
        check_runs(ranks.run(train_custom, three_layers, evaluating_first, strategy, orig), want)


def inferring_first(
    model: Any, rank: int, step: int, device: torch.device, scale: float
) -> list[Tensor]:
    with torch.inference_mode():
        inferred = model(inputs(rank, 50 + step).to(device)).pow(2).sum()
    return [inferred.clone(), *one_pass(model, rank, step, device, scale)]


@chapter.must(
    "fsdp/inference-mode",
    "After a forward in inference mode, even if it is the first forward, training is the same as "
    "the bare module's.",
    source="derived; torch 2.13 keeps tensors of inference mode, which training cannot use",
)
@world_sizes(2)
@both_kinds
def test_inference_mode(ranks: Ranks, orig: bool) -> None:
    want = train_custom_whole(three_layers, inferring_first, ranks.world_size)
    for strategy in STRATEGIES:
        check_runs(ranks.run(train_custom, three_layers, inferring_first, strategy, orig), want)
    # Parameters are float64, computation is in float32.
    low = {"mixed_precision": MixedPrecision(param_dtype=torch.float32)}
    got = ranks.run(train_custom, three_layers, inferring_first, "FULL_SHARD", orig, 3, low)
    check_tensors([run.params for run in got], [run.params for run in want], within=1e-4)


def adversarial(
    model: Any, rank: int, step: int, device: torch.device, scale: float
) -> list[Tensor]:
    """The input is moved along its gradient before it is trained with."""
    x = inputs(rank, step).to(device).requires_grad_()
    first = model(x).pow(2).sum()
    (grad,) = torch.autograd.grad(first, x)
    loss = model(x.detach() + 0.1 * grad).pow(2).sum()
    (scale * loss).backward()
    return [first, loss]


@chapter.must(
    "fsdp/gradients-of-inputs",
    "torch.autograd.grad of an input gives the bare module's gradient and does not affect later "
    "training.",
    source="derived: so it is for the bare module",
)
@world_sizes(2)
@both_kinds
def test_gradients_of_inputs(ranks: Ranks, orig: bool) -> None:
    want = train_custom_whole(three_layers, adversarial, ranks.world_size)
    for strategy in STRATEGIES[:2]:
        check_runs(ranks.run(train_custom, three_layers, adversarial, strategy, orig), want)


def train_two_models(me: Me, strategy: str, orig: bool) -> dict[str, Tensor]:
    """Parameters of two models, of which one is given what the other returns."""

    def unit(module: nn.Module) -> Any:
        return wrap(me, module, sharding_strategy=ShardingStrategy[strategy], use_orig_params=orig)

    both = [three_layers(unit), unit(linear(2, 3, 4))]
    step_two_models(both, [me.rank], me.device, 1.0)
    first, second = (full_parameters(model) for model in both)
    return {**first, **{f"second.{name}": value for name, value in second.items()}}


def step_two_models(
    both: list[Any], batches: list[int], device: torch.device, scale: float
) -> None:
    params = [param for model in both for param in model.parameters()]
    optimizer = torch.optim.SGD(params, lr=0.1)
    for step in range(2):
        for rank in batches:
            out = both[1](torch.tanh(both[0](inputs(rank, step).to(device))))
            (scale * out.pow(2).sum()).backward()
        optimizer.step()
        optimizer.zero_grad()


@chapter.must(
    "fsdp/two-roots",
    "Models that are wrapped separately, neither of them inside the other, train in one backward.",
    source="derived: each root ends the backward of its own units",
)
@world_sizes(2, 3)
@both_kinds
def test_two_models(ranks: Ranks, orig: bool) -> None:
    n = ranks.world_size
    both = [three_layers(lambda module: module), linear(2, 3, 4)]
    step_two_models(both, list(range(n)), CPU, 1 / n)
    want = {name: param.detach() for name, param in both[0].named_parameters()}
    want |= {f"second.{name}": param.detach() for name, param in both[1].named_parameters()}
    for strategy in STRATEGIES:
        check_tensors(ranks.run(train_two_models, strategy, orig), [want] * n)


# What has no gradients


def decay_unused(me: Me, strategy: str, orig: bool) -> dict[str, Tensor]:
    """Parameters after a step with weight decay in which one branch is not in the loss."""

    def unit(module: nn.Module) -> Any:
        return wrap(me, module, sharding_strategy=ShardingStrategy[strategy], use_orig_params=orig)

    model = branches(unit)
    step_with_decay(model, [me.rank], me.device, 1.0)
    return full_parameters(model)


def step_with_decay(model: Any, batches: list[int], device: torch.device, scale: float) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.5)
    for rank in batches:
        loss_of_one_branch(model, rank, 1, device, scale)
    optimizer.step()


@chapter.must(
    "fsdp/unused-have-no-gradient",
    "Parameters of a unit that the backward does not reach have no gradients, so that weight "
    "decay leaves them as they are.",
    source="derived: so it is for the bare module",
)
@world_sizes(2)
@both_kinds
def test_what_is_unused_does_not_decay(ranks: Ranks, orig: bool) -> None:
    n = ranks.world_size
    bare = branches(lambda module: module)
    step_with_decay(bare, list(range(n)), CPU, 1 / n)
    want = {name: param.detach() for name, param in bare.named_parameters()}
    for strategy in STRATEGIES[:2]:
        check_tensors(ranks.run(decay_unused, strategy, orig), [want] * n)


def resume_unused(me: Me, orig: bool) -> tuple[list[str], list[dict[str, Tensor]]]:
    """Names with state, of which one branch has none; parameters one step after another model and
    its new optimizer have loaded everything, and those of the first model."""

    def unit(module: nn.Module) -> Any:
        return wrap(me, module, use_orig_params=orig)

    models = [branches(unit) for _ in range(2)]
    optimizer, other = (torch.optim.Adam(model.parameters(), lr=0.1) for model in models)
    loss_of_one_branch(models[0], me.rank, 1, me.device, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    models[1].load_state_dict(models[0].state_dict())
    state = saved(models[0], optimizer, FULL, ON_DEVICE)
    names = sorted(state["state"])
    other.load_state_dict(loadable(models[1], other, state, FULL, ON_DEVICE))
    for model, its in zip(models, (optimizer, other), strict=True):
        loss_of_one_branch(model, me.rank, 2, me.device, 1.0)
        its.step()
    return names, [full_parameters(model) for model in models]


@chapter.must(
    "fsdp/optimizer-state-of-unused",
    "An optimizer state dict has no entries for parameters that were not stepped, and without "
    "them it can be loaded by an optimizer that has not stepped yet.",
    source="torch 2.13 docs, FullyShardedDataParallel, optim_state_dict: the optimizer's own state",
)
@world_sizes(2, 3)
@both_kinds
def test_state_of_what_is_unused(ranks: Ranks, orig: bool) -> None:
    bare = branches(lambda module: module)
    used = sorted(name for name, _ in bare.named_parameters() if "second" not in name)
    got = ranks.run(resume_unused, orig)
    assert_same_on_all_ranks([names for names, _ in got], used, what="names with state")
    for _, (before, after) in got:
        check_tensors([after], [before], within=1e-9)


# Changes of the model


class HalfFrozen(nn.Module):
    """Two layers, of which the first one is frozen when it is wrapped."""

    def __init__(self, unit: Unit) -> None:
        super().__init__()
        self.first = unit(linear(3, 3, 1).requires_grad_(False))
        self.last = unit(linear(3, 2, 2))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(torch.tanh(self.first(x)))
        return out


def half_frozen(unit: Unit) -> Any:
    return unit(HalfFrozen(unit))


def thawing(model: Any, rank: int, step: int, device: torch.device, scale: float) -> list[Tensor]:
    """The first layer is frozen in the first step, and the last one in the last step."""
    for name, param in model.named_parameters():
        param.requires_grad_(step != (0 if "first" in name else 2))
    return one_pass(model, rank, step, device, scale)


@chapter.must(
    "fsdp/freezing-and-thawing",
    "With use_orig_params=True parameters can be frozen, and trained again, from one step to "
    "the next.",
    source="torch 2.13, _reset_flat_param_grad_info_if_needed",
)
@world_sizes(2)
def test_freezing_and_thawing(ranks: Ranks) -> None:
    want = train_custom_whole(half_frozen, thawing, ranks.world_size)
    for strategy in STRATEGIES:
        check_runs(ranks.run(train_custom, half_frozen, thawing, strategy, True), want)


def layers_made_double(unit: Unit) -> Any:
    return two_layers(lambda module: unit(module.float())).double()


@chapter.must(
    "fsdp/another-dtype",
    "A model that is converted to another dtype after wrapping computes and trains in that dtype.",
    source="torch 2.13, init_flat_param_attributes: 'the user changed the parameter dtype'",
)
@world_sizes(2)
@both_kinds
def test_another_dtype(ranks: Ranks, orig: bool) -> None:
    want = train_custom_whole(layers_made_double, one_pass, ranks.world_size)
    for strategy in STRATEGIES:
        check_runs(ranks.run(train_custom, layers_made_double, one_pass, strategy, orig), want)


def assign_larger(me: Me, strategy: str, orig: bool) -> tuple[dict[str, Tensor], Tensor]:
    """Parameters after values that are larger by 1 were assigned, and the output with them."""

    def unit(module: nn.Module) -> Any:
        return wrap(me, module, sharding_strategy=ShardingStrategy[strategy], use_orig_params=orig)

    model = two_layers(unit)
    state = {name: value.to(me.device) for name, value in larger().state_dict().items()}
    model.load_state_dict(state, assign=True)
    with torch.no_grad():
        out = model(inputs(0, 0).to(me.device))
    return full_parameters(model), out


def larger() -> nn.Module:
    bare: nn.Module = two_layers(lambda module: module)
    with torch.no_grad():
        for param in bare.parameters():
            param.add_(1)
    return bare


@chapter.should(
    "fsdp/assigned-state-dict",
    "load_state_dict with assign=True loads a full state dict as it does without assign.",
    source="torch 2.13 docs, Module.load_state_dict; torch's FSDP goes on with the old values",
)
@world_sizes(2)
@both_kinds
def test_assigning(ranks: Ranks, orig: bool) -> None:
    bare = larger()
    want = {name: param.detach() for name, param in bare.named_parameters()}
    want["output"] = bare(inputs(0, 0)).detach()
    for strategy in STRATEGIES:
        got = [
            {**params, "output": out} for params, out in ranks.run(assign_larger, strategy, orig)
        ]
        check_tensors(got, [want] * ranks.world_size)

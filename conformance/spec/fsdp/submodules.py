"""FSDP with frozen or ignored submodules, and inner units that are summoned or evaluate."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from conformance import Chapter, Me, Ranks, assert_same_on_all_ranks, assert_that, world_sizes
from conformance.oracle.near import Near
from conformance.spec.fsdp.custom import (
    Unit,
    check_custom,
    inputs,
    linear,
    train_custom,
    train_custom_whole,
)
from conformance.spec.fsdp.models import Block, Net
from conformance.spec.fsdp.small_models import one_pass, two_layers
from conformance.spec.fsdp.training_runs import (
    STRATEGIES,
    Recipe,
    both_kinds,
    check_runs,
    check_tensors,
    full_parameters,
    wrap,
)
from conformance.spec.tolerance import assert_near

chapter = Chapter("fsdp")


# Frozen


class OfTwo(nn.Linear):
    """A frozen layer that is given two inputs and uses the first."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.load_state_dict(linear(3, 3, 1).state_dict())
        self.double().requires_grad_(False)

    def forward(self, x: Tensor, unused: Tensor | None = None) -> Tensor:
        return super().forward(x)


class AroundFrozen(nn.Module):
    """The frozen layer's second input requires gradients."""

    def __init__(self, unit: Unit) -> None:
        super().__init__()
        self.first, self.frozen = unit(linear(3, 3, 2)), unit(OfTwo())
        self.last = unit(linear(3, 2, 3))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        out: Tensor = self.last(hidden * self.frozen(x, hidden))
        return out


def around_frozen(unit: Unit) -> Any:
    return unit(AroundFrozen(unit))


@chapter.must(
    "fsdp/frozen-unit-with-unused-input",
    "A frozen unit may have an input that requires gradients but that it does not use.",
    source="pytorch#117510",
    rests_on="fsdp/frozen-unit",
)
@world_sizes(2, 3)
@both_kinds
def test_an_input_that_a_frozen_unit_does_not_use(ranks: Ranks, orig: bool) -> None:
    for strategy in STRATEGIES:
        check_custom(ranks, around_frozen, one_pass, strategy, orig)


def thawing_after_eval(
    model: Any, rank: int, step: int, device: torch.device, scale: float
) -> list[Tensor]:
    """After a forward without gradients the first layer is frozen, or trained, by turns."""
    with torch.no_grad():
        model(inputs(rank, 50 + step).to(device))
    for name, param in model.named_parameters():
        param.requires_grad_(step % 2 == 1 or "0" not in name)
    return one_pass(model, rank, step, device, scale)


@chapter.must(
    "fsdp/thawed-after-evaluation",
    "With use_orig_params=True, freezing or thawing parameters after a forward without gradients "
    "takes effect in the next step, whatever the strategy keeps unsharded.",
    source="pytorch#105371",
    rests_on="fsdp/freezing-and-thawing",
)
@world_sizes(2)
def test_thawed_after_a_forward_without_gradients(ranks: Ranks) -> None:
    want = train_custom_whole(two_layers, thawing_after_eval, ranks.world_size, 4)
    for strategy in STRATEGIES:
        got = ranks.run(train_custom, two_layers, thawing_after_eval, strategy, True, 4)
        check_runs(got, want)


# Ignored


def ignored_in_units(me: Me, orig: bool) -> tuple[list[list[int]], list[str], int]:
    """Shapes of ignored parameters; names of those that are not whole parameters any more;
    elements of the others."""
    network = Net().make(device=me.device)
    ignored: list[Any] = [network.head.weight]
    ignored += [block.get_parameter("up.weight") for block in network.blocks]
    model = wrap(
        me,
        network,
        ignored_states=ignored,
        use_orig_params=orig,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
    )
    Net().loss(model, me.rank, 0, me.device).backward()
    there = {id(p) for p in model.parameters()}
    lost = [str(i) for i, param in enumerate(ignored) if id(param) not in there]
    others = [p for p in model.parameters() if all(p is not param for param in ignored)]
    shapes = [list(param.shape) for param in ignored]
    return shapes, lost, sum(p.numel() for p in others)


@chapter.must(
    "fsdp/ignored-parameters-of-units",
    "Ignored parameters stay as they are, also in modules that a policy makes units of.",
    source="pytorch#104258",
    rests_on="fsdp/ignored-parameters",
)
@world_sizes(2)
@both_kinds
def test_ignored_parameters_of_units(ranks: Ranks, orig: bool) -> None:
    net = Net()
    shapes = [[net.vocabulary, net.width], *[[net.hidden, net.width]] * net.blocks]
    total = sum(p.numel() for p in net.make().parameters())
    rest = total - sum(a * b for a, b in shapes)
    for rank, (mine, lost, numel) in enumerate(ranks.run(ignored_in_units, orig)):
        assert_that(mine == shapes, f"shapes of ignored parameters: {mine}", rank)
        assert_that(not lost, f"no parameters any more: {lost}", rank)
        assert_that(numel < 0.7 * rest, f"{numel} of {rest} elements: not sharded", rank)


def norm_with_ignored(me: Me, orig: bool) -> list[Tensor]:
    """The norm; and, after clipping to half of it, that again and the ignored layer's own."""
    network = Net(dtype="float32").make(device=me.device)
    model = wrap(me, network, ignored_modules=[network.head], use_orig_params=orig)
    Net(dtype="float32").loss(model, 0, 0, me.device).backward()
    norm: Tensor = model.clip_grad_norm_(1e9)
    model.clip_grad_norm_(norm.item() / 2)
    grad = network.head.weight.grad
    assert isinstance(grad, Tensor)
    return [norm, model.clip_grad_norm_(1e9), grad.norm()]


@chapter.must(
    "fsdp/norm-with-ignored",
    "Gradients of ignored parameters count once in the norm, and are clipped like others.",
    source="torch 2.13 docs, FullyShardedDataParallel, clip_grad_norm_: the gradients of all "
    "parameters",
    rests_on=("fsdp/norm", "fsdp/ignored-modules"),
)
@world_sizes(2, 3)
@both_kinds
def test_norms_with_ignored_parameters(ranks: Ranks, orig: bool) -> None:
    bare = Net(dtype="float32").make()
    Net(dtype="float32").loss(bare, 0, 0, torch.device("cpu")).backward()
    grads = {name: p.grad for name, p in bare.named_parameters() if p.grad is not None}
    norm = nn.utils.get_total_norm(grads.values())
    want = [norm, norm / 2, grads["head.weight"].norm() / 2]
    for mine in ranks.run(norm_with_ignored, orig):
        near = [Near.relative(value, 1e-4) for value in want]
        assert_near(mine, near, "the norm, the clipped one and the ignored layer's")


def norm_in_low_precision(me: Me, orig: bool) -> tuple[list[Tensor], list[str]]:
    """The norm, that after clipping to a quarter of it; dtypes of gradients."""
    low = MixedPrecision(torch.bfloat16, torch.bfloat16, keep_low_precision_grads=True)
    net = Net(dtype="float32")
    model = Recipe(net, orig=orig, kwargs={"mixed_precision": low}).wrapped(me)
    net.loss(model, 0, 0, me.device).backward()
    norm: Tensor = model.clip_grad_norm_(1e9).float()
    model.clip_grad_norm_(norm.item() / 4)
    kinds = {str(p.grad.dtype) for p in model.parameters() if p.grad is not None}
    return [norm, model.clip_grad_norm_(1e9).float()], sorted(kinds)


@chapter.must(
    "fsdp/norm-of-low-precision-gradients",
    "Gradients that stay in low precision count in the norm, and keep their dtype when they are "
    "clipped.",
    source="pytorch#90028",
    rests_on=("fsdp/norm", "fsdp/keep-low-precision-gradients"),
)
@world_sizes(2)
@both_kinds
def test_norms_of_gradients_in_low_precision(ranks: Ranks, orig: bool) -> None:
    net = Net(dtype="float32")
    bare = net.make()
    net.loss(bare, 0, 0, torch.device("cpu")).backward()
    norm = nn.utils.get_total_norm([p.grad for p in bare.parameters() if p.grad is not None])
    near = [Near.relative(value, 0.03) for value in (norm, norm / 4)]
    got = ranks.run(norm_in_low_precision, orig)
    for mine, _ in got:
        assert_near(mine, near, "the norm and the clipped one")
    assert_same_on_all_ranks(
        [kinds for _, kinds in got], ["torch.bfloat16"], what="dtypes of gradients"
    )


# Looked at on their own


def show_inner(me: Me, orig: bool, held: bool) -> tuple[list[list[int]], dict[str, Tensor]]:
    """Shapes that an inner unit shows, if it or the list that holds it is summoned; all parameters
    after the unit's were raised by 1."""
    model = Recipe(orig=orig).wrapped(me)
    Net().loss(model, me.rank, 0, me.device).backward()
    model.zero_grad()
    blocks = model.module.blocks
    with type(model).summon_full_params(blocks if held else blocks[0]), torch.no_grad():
        shapes = [list(p.shape) for p in blocks[0].parameters()]
        for param in blocks[0].parameters():
            param.add_(1)
    return shapes, full_parameters(model)


@chapter.must(
    "fsdp/summon-inner-unit",
    "summon_full_params of an inner instance, or of a module that holds it, shows it in full and "
    "keeps changes to it.",
    source="pytorch#122663",
    rests_on=("fsdp/summon", "fsdp/summon-writes-back"),
)
@world_sizes(2)
@both_kinds
@pytest.mark.parametrize("held", [False, True], ids=["unit", "list"])
def test_an_inner_unit_in_full(ranks: Ranks, orig: bool, held: bool) -> None:
    bare = Net().make()
    shapes = [list(p.shape) for p in bare.blocks[0].parameters()]
    want = {
        name: p.detach() + (1 if name.startswith("blocks.0.") else 0)
        for name, p in bare.named_parameters()
    }
    got = ranks.run(show_inner, orig, held)
    for rank, (mine, _) in enumerate(got):
        assert_that(mine == shapes, f"shapes {mine}, want {shapes}", rank)
    check_tensors([params for _, params in got], [want] * ranks.world_size)


def show_on_cpu(me: Me, orig: bool, writeback: bool) -> tuple[list[str], dict[str, Tensor]]:
    """Devices of what is shown; all parameters after they were raised by 1."""
    model = Recipe(orig=orig).wrapped(me)
    cls = type(model)
    with (
        cls.summon_full_params(model, writeback=writeback, offload_to_cpu=True),
        torch.no_grad(),
    ):
        places = {str(p.device) for p in model.parameters()}
        for param in model.parameters():
            param.add_(1)
    return sorted(places), full_parameters(model)


@chapter.must(
    "fsdp/summon-on-cpu",
    "With offload_to_cpu full parameters are shown on the CPU, and changes to them are kept.",
    source="pytorch#107081 and pytorch#188989",
    rests_on=("fsdp/summon", "fsdp/summon-writes-back"),
)
@world_sizes(2)
@both_kinds
@pytest.mark.parametrize("writeback", [False, True], ids=["discarded", "kept"])
def test_full_parameters_on_the_cpu(ranks: Ranks, orig: bool, writeback: bool) -> None:
    bare = Net().make()
    want = {name: p.detach() + int(writeback) for name, p in bare.named_parameters()}
    got = ranks.run(show_on_cpu, orig, writeback)
    assert_same_on_all_ranks([places for places, _ in got], ["cpu"], what="devices")
    check_tensors([params for _, params in got], [want] * ranks.world_size)


class Noting(nn.Linear):
    """Notes the dtypes of its input and of its weight."""

    def __init__(self, seen: list[str]) -> None:
        super().__init__(3, 3)
        self.seen = seen

    def forward(self, x: Tensor) -> Tensor:
        self.seen += [str(x.dtype), str(self.weight.dtype)]
        return super().forward(x)


def dtypes_of_modes(me: Me, strategy: str, orig: bool) -> list[list[str]]:
    """Dtypes in units that cast their inputs: in training, in evaluation, and in training."""
    seen: list[str] = []
    low = MixedPrecision(torch.bfloat16, torch.float32, cast_forward_inputs=True)
    with mock.patch.dict(os.environ, {"FSDP_USE_FULL_PREC_IN_EVAL": "1"}):
        model = wrap(
            me,
            nn.Sequential(Noting(seen), Noting(seen)),
            mixed_precision=low,
            auto_wrap_policy=ModuleWrapPolicy({Noting}),
            sharding_strategy=ShardingStrategy[strategy],
            use_orig_params=orig,
        )
    found = []
    for training in (True, False, True):
        model.train(training)
        with torch.set_grad_enabled(training):
            out = model(inputs(0, 0).float().to(me.device))
        if training:
            out.float().sum().backward()
        found.append(sorted(set(seen)))
        seen.clear()
    return found


@chapter.must(
    "fsdp/full-precision-eval-of-units",
    "With FSDP_USE_FULL_PREC_IN_EVAL=1 units that cast their inputs leave them in full "
    "precision in eval mode, and cast them again in training.",
    source="pytorch#103862",
    rests_on=("fsdp/full-precision-eval", "fsdp/cast-unit-inputs"),
)
@world_sizes(2)
@both_kinds
def test_units_evaluate_in_full_precision(ranks: Ranks, orig: bool) -> None:
    low, full = ["torch.bfloat16"], ["torch.float32"]
    for strategy in STRATEGIES:
        got = ranks.run(dtypes_of_modes, strategy, orig)
        assert_same_on_all_ranks(got, [low, full, low], what=f"dtypes with {strategy}")

"""FSDP's clip_grad_norm_: norms over all ranks, hybrid sharding, precision, frozen parameters."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecision

from conformance import Chapter, Me, Ranks, assert_same_on_all_ranks, covers, world_sizes
from conformance.oracle.near import Near
from conformance.spec.fsdp.models import Net
from conformance.spec.fsdp.training_runs import (
    HYBRIDS,
    STRATEGIES,
    Recipe,
    both_kinds,
    halves,
    inner_unit,
    mean_gradients,
    wrap,
)
from conformance.spec.raising import assert_raised
from conformance.spec.tolerance import assert_near

DOCS = "torch 2.13 docs, FullyShardedDataParallel"

chapter = Chapter("fsdp")


def norms(
    me: Me, recipe: Recipe, kinds: list[float], limit: float, hybrid: bool = False
) -> list[Tensor]:
    """The norm of each kind that clip_grad_norm_ returns, one after the other."""
    kwargs: dict[str, Any] = {"process_group": halves(me)} if hybrid else {}
    model = recipe.wrapped(me, **kwargs)
    recipe.net.loss(model, me.rank, 0, me.device).backward()
    return [model.clip_grad_norm_(limit, kind) for kind in kinds]


def check_norms(ranks: Ranks, recipe: Recipe, hybrid: bool = False, within: float = 1e-5) -> None:
    kinds = [2.0, 1.0, 3.0, float("inf")]
    grads = list(mean_gradients(recipe.net, ranks.world_size).values())
    want = [nn.utils.get_total_norm(grads, kind) for kind in kinds]
    for mine in ranks.run(norms, recipe, kinds, 1e9, hybrid):
        near = [Near.relative(norm, within) for norm in want]
        assert_near(mine, near, "norms 2, 1, 3 and infinity, as if of three ranks")


@chapter.must(
    "fsdp/norm",
    "clip_grad_norm_ returns the norm of all ranks' shards together, for norms 1, 2, 3 "
    "and infinity, and with every strategy.",
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


def norm_of_low_precision(me: Me) -> tuple[str, float]:
    """The norm of four gradients of 2, and its dtype."""
    precision = MixedPrecision(torch.bfloat16, keep_low_precision_grads=True)
    model = wrap(me, nn.Linear(4, 1, bias=False), mixed_precision=precision)
    model(torch.full((1, 4), 2.0, device=me.device)).sum().backward()
    norm = model.clip_grad_norm_(1e9)
    return str(norm.dtype), norm.item()


@covers("fsdp/norm", "fsdp/keep-low-precision-gradients")
@world_sizes(2)
def test_norm_of_gradients_in_low_precision(ranks: Ranks) -> None:
    """It has the widest dtype among the gradients."""
    got = ranks.run(norm_of_low_precision)
    assert_same_on_all_ranks(got, ("torch.bfloat16", 4.0), what="norm in low precision")


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


class HalfIgnored(nn.Module):
    """Two parameters with the same gradient, of which FSDP is to ignore one."""

    def __init__(self) -> None:
        super().__init__()
        self.sharded = nn.Parameter(torch.ones(4))
        self.ignored = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return (self.sharded * x + self.ignored * x).sum()


def norms_with_ignored(me: Me, orig: bool) -> list[float]:
    """Norms infinity, 1 and 2 of eight gradients of 3; then an ignored one, clipped to 1 / 4."""
    module = HalfIgnored().to(me.device)
    model = wrap(me, module, ignored_states=[module.ignored], use_orig_params=orig)
    model(torch.full((4,), 3.0, device=me.device)).backward()
    found = [model.clip_grad_norm_(1e9, kind).item() for kind in (float("inf"), 1.0)]
    found.append(model.clip_grad_norm_(72**0.5 / 4).item())
    assert module.ignored.grad is not None
    return [round(norm, 4) for norm in (*found, module.ignored.grad[0].item())]


@chapter.must(
    "fsdp/norm-of-ignored",
    "The gradient of a parameter that FSDP ignores counts once in the norm, however many ranks "
    "there are, and is scaled down like the others.",
    source="torch 2.13, clip_grad_norm_: nonsharded_params",
    rests_on="fsdp/norm",
)
@world_sizes(3)
@both_kinds
def test_norms_with_an_ignored_parameter(ranks: Ranks, orig: bool) -> None:
    want = [3.0, 24.0, round(72**0.5, 4), 0.75]
    got = ranks.run(norms_with_ignored, orig)
    assert_same_on_all_ranks(got, want, what="norms, and a clipped gradient")


def clip_inner(me: Me) -> None:
    inner_unit(me).clip_grad_norm_(1.0)


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

"""Which modules become FSDP units: auto-wrap policies, enable_wrap and wrap, shared modules."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    always_wrap_policy,
    enable_wrap,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)
from torch.distributed.fsdp.wrap import wrap as wrap_annotated

from conformance import (
    Chapter,
    Me,
    Ranks,
    assert_same_on_all_ranks,
    covers,
    world_sizes,
)
from conformance.spec.additions import silently_local
from conformance.spec.facts import check_fact
from conformance.spec.fsdp.custom import linear
from conformance.spec.fsdp.models import Block
from conformance.spec.fsdp.training_runs import (
    wrap,
)
from conformance.target import resolve

DOCS = "torch 2.13 docs, FullyShardedDataParallel"

chapter = Chapter("fsdp")


class Layers(nn.Module):
    """Layers of several sizes, one inside of another module."""

    def __init__(self) -> None:
        super().__init__()
        self.small = nn.Linear(2, 2)
        self.block = Block(4, 5)
        self.pair = nn.Sequential(nn.Linear(9, 9), nn.Linear(3, 3))


POLICIES: dict[str, tuple[Any, list[str]]] = {
    "ModuleWrapPolicy": (ModuleWrapPolicy({Block, nn.Sequential}), ["block", "pair"]),
    "always": (
        always_wrap_policy,
        ["block", "block.down", "block.norm", "block.up", "pair", "pair.0", "pair.1", "small"],
    ),
    "size": (functools.partial(size_based_auto_wrap_policy, min_num_params=90), ["pair.0"]),
    "transformer": (
        functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block}),
        ["block"],
    ),
    "lambda": (
        functools.partial(
            lambda_auto_wrap_policy,
            lambda_fn=lambda module: isinstance(module, nn.Linear) and module.in_features < 4,
        ),
        ["pair.1", "small"],
    ),
    "CustomPolicy": (
        CustomPolicy(
            lambda module: (
                {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}
                if isinstance(module, Block)
                else False
            )
        ),
        ["block"],
    ),
}


def units_by_policy(me: Me, policy: str, without: list[str]) -> tuple[list[str], list[str]]:
    """Names of the units below the root, and their strategies."""
    module = Layers()
    ignored = [module.get_submodule(name) for name in without]
    model = wrap(me, module, auto_wrap_policy=POLICIES[policy][0], ignored_modules=ignored)
    found = {
        name.replace("_fsdp_wrapped_module.", "").replace("_fsdp_wrapped_module", ""): part
        for name, part in model.named_modules()
        if isinstance(part, type(model)) and part is not model
    }
    strategies = {unit.sharding_strategy.name for unit in found.values()}
    return sorted(found), sorted(strategies)


@chapter.must(
    "fsdp/wrap-policies",
    "Policies of torch.distributed.fsdp.wrap make units of the modules that they name.",
    source=f"{DOCS}, auto_wrap_policy",
)
@world_sizes(2)
@pytest.mark.parametrize("policy", list(POLICIES))
def test_policies(ranks: Ranks, policy: str) -> None:
    names = POLICIES[policy][1]
    strategy = "SHARD_GRAD_OP" if policy == "CustomPolicy" else "FULL_SHARD"
    got = ranks.run(units_by_policy, policy, [])
    assert_same_on_all_ranks(got, (names, [strategy]), what="units")


@covers("fsdp/wrap-policies", "fsdp/ignored-modules")
@world_sizes(2)
def test_policies_leave_ignored_modules(ranks: Ranks) -> None:
    got = ranks.run(units_by_policy, "always", ["block"])
    want = (["pair", "pair.0", "pair.1", "small"], ["FULL_SHARD"])
    assert_same_on_all_ranks(got, want, what="units")


def annotate(me: Me) -> list[str]:
    cls = resolve(me.target.fsdp)
    with enable_wrap(wrapper_cls=cls, device_id=me.device):
        module = nn.Sequential(wrap_annotated(nn.Linear(2, 2)), nn.ReLU())
    made = cls if isinstance(cls, type) else type(cls(nn.Linear(2, 2), device_id=me.device))
    return [type(part).__name__.replace(made.__name__, "the class") for part in module]


@chapter.must(
    "fsdp/annotated-wrapping",
    "enable_wrap and wrap of torch.distributed.fsdp.wrap work with the class.",
    source="torch 2.13, torch.distributed.fsdp.wrap",
)
@world_sizes(2)
def test_wrapping_by_annotation(ranks: Ranks) -> None:
    assert_same_on_all_ranks(ranks.run(annotate), ["the class", "ReLU"], what="types")


class Aliases(nn.Module):
    """One layer under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.one = self.other = linear(3, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.other(torch.tanh(self.one(x)))
        return out


def wrap_aliases(me: Me) -> tuple[bool, bool]:
    """Whether both names hold one thing, and whether that is an instance."""
    aliases = Aliases()
    model = wrap(me, aliases, auto_wrap_policy=always_wrap_policy)
    return aliases.one is aliases.other, isinstance(aliases.other, type(model))


@chapter.must(
    "fsdp/shared-module",
    "A module in two places becomes one unit, and both places hold it.",
    source="derived; torch 2.13 leaves all but the first place as they were",
)
@world_sizes(2)
def test_a_module_under_two_names(ranks: Ranks) -> None:
    assert_same_on_all_ranks(ranks.run(wrap_aliases), (True, True), what="the two names")


def added_to_fsdp(me: Me) -> list[str]:
    return silently_local(me, lambda module: wrap(me, module, use_orig_params=True))


@chapter.should(
    "fsdp/added-layer",
    "A layer that is added to a module after it was wrapped is taken in, or a warning names its "
    "parameters, or the first forward is refused; its gradients never silently stay local.",
    source="derived: a mistake that would go unnoticed",
)
@world_sizes(2)
def test_a_layer_that_was_added(ranks: Ranks) -> None:
    check_fact(ranks, added_to_fsdp)

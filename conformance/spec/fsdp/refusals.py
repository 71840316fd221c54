"""What the wrapper refuses, with which words, and that nobody hangs."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, always_wrap_policy

from conformance import Chapter, Me, Ranks, assert_that, covers, world_sizes
from conformance.spec.fsdp.models import Net
from conformance.spec.fsdp.training_runs import Recipe, halves, wrap
from conformance.spec.raising import assert_raised

chapter = Chapter("fsdp", source="observed, torch 2.13.0")


HYBRID = ShardingStrategy.HYBRID_SHARD


def layer() -> nn.Linear:
    return nn.Linear(2, 2)


def run_model(me: Me, model: Any) -> None:
    model(torch.ones(1, 2, device=me.device)).sum().backward()


def mesh_and_group(me: Me) -> None:
    mesh = init_device_mesh(me.device.type, (me.world_size,))
    wrap(me, layer(), process_group=dist.group.WORLD, device_mesh=mesh)


def hybrid_without_groups(me: Me) -> None:
    wrap(me, layer(), sharding_strategy=HYBRID)


def hybrid_with_one_group(me: Me) -> None:
    wrap(me, layer(), sharding_strategy=HYBRID, process_group=dist.group.WORLD)


def hybrid_on_a_line(me: Me) -> None:
    mesh = init_device_mesh(me.device.type, (me.world_size,))
    wrap(me, layer(), sharding_strategy=HYBRID, device_mesh=mesh)


def wrapped_twice(me: Me) -> None:
    module = layer()
    run_model(me, nn.Sequential(wrap(me, module), wrap(me, module)))


def auto_wrapped_twice(me: Me) -> None:
    wrap(me, nn.Sequential(wrap(me, layer())), auto_wrap_policy=always_wrap_policy)


def instance_ignored(me: Me) -> None:
    wrap(me, nn.Sequential(layer()), ignored_modules=[wrap(me, layer())])


def mixed_dtypes(me: Me) -> None:
    wrap(me, nn.Sequential(layer(), layer().double()))


def mixed_requires_grad(me: Me) -> None:
    module = nn.Sequential(layer(), layer())
    module[0].requires_grad_(False)
    wrap(me, module)


def mixed_limits(me: Me) -> None:
    inner = wrap(me, layer(), limit_all_gathers=False)
    run_model(me, wrap(me, nn.Sequential(inner, layer())))


def mixed_kinds(me: Me) -> None:
    inner = wrap(me, layer(), use_orig_params=True)
    run_model(me, wrap(me, nn.Sequential(inner, layer())))


def root_becomes_part(me: Me) -> None:
    inner = wrap(me, layer())
    run_model(me, inner)
    run_model(me, wrap(me, nn.Sequential(inner, layer())))


def strategy_changes(me: Me) -> None:
    model = wrap(me, layer())
    run_model(me, model)
    model.sharding_strategy = ShardingStrategy.SHARD_GRAD_OP


def tied_units(me: Me) -> None:
    network = Net(tied=True).make(device=me.device)
    head: Any = wrap(me, network.head)
    network.head = head
    Net().loss(wrap(me, network), me.rank, 0, me.device).backward()


def hook_for_inner(me: Me) -> None:
    model = Recipe().wrapped(me)
    model.check_is_root()
    type(model).fsdp_modules(model)[1].register_comm_hook(None, print)


def two_hooks(me: Me) -> None:
    model = wrap(me, layer())
    model.register_comm_hook(None, print)
    model.register_comm_hook(None, print)


def hook_that_is_none(me: Me) -> None:
    wrap(me, layer()).register_comm_hook(None, 5)


def numbered_state(me: Me) -> None:
    model = wrap(me, layer())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    run_model(me, model)
    optimizer.step()
    named = type(model).optim_state_dict(model, optimizer)
    state = {"state": dict(enumerate(named["state"].values()))}
    type(model).optim_state_dict_to_load(model, optimizer, state)


REFUSED = [
    ("fsdp/mesh-and-group", mesh_and_group, ValueError, "Cannot pass both process_group and"),
    ("fsdp/hybrid-needs-groups", hybrid_without_groups, ValueError, "requires explicit"),
    ("fsdp/hybrid-needs-groups", hybrid_with_one_group, ValueError, "Expected process_group to be"),
    ("fsdp/hybrid-needs-groups", hybrid_on_a_line, ValueError, "Expected device_mesh to have ndim"),
    ("fsdp/wrapped-twice", wrapped_twice, ValueError, ""),
    ("fsdp/auto-wrapped-twice", auto_wrapped_twice, ValueError, "to not already have FSDP applied"),
    ("fsdp/ignored-instance", instance_ignored, ValueError, "should not include FSDP modules"),
    ("fsdp/mixed-dtypes", mixed_dtypes, ValueError, "Must flatten tensors with uniform dtype"),
    ("fsdp/mixed-requires-grad", mixed_requires_grad, ValueError, "uniform `requires_grad` when"),
    ("fsdp/homogeneous-settings", mixed_limits, ValueError, "one homogeneous value for limit_all"),
    ("fsdp/homogeneous-settings", mixed_kinds, ValueError, "Expects one homogeneous value for"),
    ("fsdp/root-becomes-part", root_becomes_part, AssertionError, "_is_root"),
    ("fsdp/strategy-changes", strategy_changes, RuntimeError, "cannot change"),
    ("fsdp/tied-across-units", tied_units, ValueError, "shared"),
    ("fsdp/comm-hook-refused", hook_for_inner, AssertionError, "only be called on a root"),
    ("fsdp/comm-hook-refused", two_hooks, AssertionError, "already registered"),
    ("fsdp/comm-hook-refused", hook_that_is_none, ValueError, "must be callable"),
    ("fsdp/optimizer-state-by-number", numbered_state, Exception, ""),
]


def _check(ranks: Ranks, requirement: str) -> None:
    for id, function, kind, words in REFUSED:
        if id == requirement:
            assert_raised(ranks.outcomes(function), kind, match=words, what=function.__name__)


def _case(requirement: str) -> Any:
    return pytest.param(requirement, marks=covers(requirement), id=requirement.split("/")[1])


@world_sizes(2)
@pytest.mark.parametrize("requirement", [_case(id) for id in dict.fromkeys(r[0] for r in REFUSED)])
def test_refused(ranks: Ranks, requirement: str) -> None:
    _check(ranks, requirement)


def hook_for_replicas(me: Me) -> None:
    model = wrap(me, layer(), sharding_strategy=HYBRID, process_group=halves(me))
    model.register_comm_hook(None, print)


@chapter.must(
    "fsdp/comm-hook-refused",
    "A hook for an inner instance or for hybrid sharding, or a second one, raises "
    "AssertionError; what cannot be called raises ValueError.",
    source="torch 2.13, register_comm_hook",
)
@world_sizes(4)
def test_no_hook_for_hybrid_sharding(ranks: Ranks) -> None:
    words = "not supported for hybrid strategies"
    assert_raised(ranks.outcomes(hook_for_replicas), AssertionError, match=words)


def warn_of_container(me: Me) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        wrap(me, nn.ModuleList([layer()]), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    return [str(warning.message) for warning in caught]


@chapter.should(
    "fsdp/container-without-forward",
    "To wrap a ModuleList or ModuleDict warns that it will not be gathered.",
)
@world_sizes(2)
def test_a_container(ranks: Ranks) -> None:
    for rank, said in enumerate(ranks.run(warn_of_container)):
        told = any("containers that do not implement forward" in words for words in said)
        assert_that(told, f"warnings: {said}", rank)


def without_groups(me: Me) -> None:
    wrap(me, layer())


@chapter.must(
    "fsdp/without-default-group",
    "Without a default group the constructor raises ValueError 'Default process group has not "
    "been initialized'.",
)
@world_sizes(1)
def test_without_a_default_group(bare_ranks: Ranks) -> None:
    words = "Default process group has not been initialized"
    assert_raised(bare_ranks.outcomes(without_groups), ValueError, match=words)

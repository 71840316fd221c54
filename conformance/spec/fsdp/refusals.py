"""Errors of FSDP: invalid arguments, wrapping, settings and hooks, with the message of each."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy, always_wrap_policy

from conformance import Chapter, Me, Ranks, assert_that, covers, world_sizes
from conformance.spec.fsdp.models import Net
from conformance.spec.fsdp.training_runs import Recipe, both_kinds, halves, wrap
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


# What the ranks do, the exception that each of them gets, and words of it.
Refusal = tuple[Callable[[Me], object], type[Exception], str]


def refused(rule: pytest.MarkDecorator, *refusals: Refusal) -> Any:
    """A parameter, named as the rule is."""
    return pytest.param(refusals, marks=rule, id=rule.args[0].id.split("/")[1])


REFUSED = [
    refused(
        chapter.must(
            "fsdp/mesh-and-group",
            "A device_mesh and a process_group together raise ValueError 'Cannot pass both "
            "process_group and device_mesh'.",
        ),
        (mesh_and_group, ValueError, "Cannot pass both process_group and"),
    ),
    refused(
        chapter.must(
            "fsdp/hybrid-needs-groups",
            "Hybrid sharding without a policy needs groups, and raises ValueError without any, "
            "with a single group and with a one-dimensional mesh.",
        ),
        (hybrid_without_groups, ValueError, "requires explicit"),
        (hybrid_with_one_group, ValueError, "Expected process_group to be"),
        (hybrid_on_a_line, ValueError, "Expected device_mesh to have ndim"),
    ),
    refused(
        chapter.must(
            "fsdp/wrapped-twice",
            "Wrapping a module that an instance has already wrapped raises ValueError.",
            source="derived; torch 2.13 says so of auto wrapping, and otherwise fails in the first "
            "forward",
        ),
        (wrapped_twice, ValueError, ""),
    ),
    refused(
        chapter.must(
            "fsdp/auto-wrapped-twice",
            "Auto wrapping of a module that holds an instance raises ValueError 'FSDP auto "
            "wrapping requires modules to not already have FSDP applied'.",
        ),
        (auto_wrapped_twice, ValueError, "to not already have FSDP applied"),
    ),
    refused(
        chapter.must(
            "fsdp/ignored-instance",
            "An instance among ignored_modules raises ValueError 'should not include FSDP "
            "modules'.",
        ),
        (instance_ignored, ValueError, "should not include FSDP modules"),
    ),
    refused(
        chapter.must(
            "fsdp/mixed-dtypes",
            "Parameters of several dtypes in one unit raise ValueError 'Must flatten tensors "
            "with uniform dtype'.",
        ),
        (mixed_dtypes, ValueError, "Must flatten tensors with uniform dtype"),
    ),
    refused(
        chapter.must(
            "fsdp/mixed-requires-grad",
            "Without original parameters, frozen and trained parameters in one unit raise "
            "ValueError 'Must flatten tensors with uniform `requires_grad` when "
            "`use_orig_params=False`'.",
        ),
        (mixed_requires_grad, ValueError, "uniform `requires_grad` when"),
    ),
    refused(
        chapter.must(
            "fsdp/homogeneous-settings",
            "Instances under one root that differ in limit_all_gathers or use_orig_params "
            "raise ValueError 'Expects one homogeneous value for' at the first forward.",
            source="torch 2.13, HOMOGENEOUS_ATTR_NAMES",
        ),
        (mixed_limits, ValueError, "one homogeneous value for limit_all"),
        (mixed_kinds, ValueError, "Expects one homogeneous value for"),
    ),
    refused(
        chapter.must(
            "fsdp/root-becomes-part",
            "An instance that ran as a root raises AssertionError if it later becomes part of "
            "another instance.",
            source="torch 2.13, _share_state_and_init_handle_attrs",
        ),
        (root_becomes_part, AssertionError, "_is_root"),
    ),
    refused(
        chapter.must(
            "fsdp/strategy-changes",
            "Setting another sharding_strategy on an existing instance raises RuntimeError.",
            source="derived; torch 2.13 takes it without a word and goes on with the old one",
        ),
        (strategy_changes, RuntimeError, "cannot change"),
    ),
    refused(
        chapter.must(
            "fsdp/tied-across-units",
            "A parameter in two units raises ValueError.",
            source="derived; torch 2.13 makes two parameters of it, which drift apart",
        ),
        (tied_units, ValueError, "shared"),
    ),
    refused(
        chapter.must(
            "fsdp/comm-hook-refused",
            "A hook for an inner instance or for hybrid sharding, or a second hook, raises "
            "AssertionError; a hook that is not callable raises ValueError.",
            source="torch 2.13, register_comm_hook",
        ),
        (hook_for_inner, AssertionError, "only be called on a root"),
        (two_hooks, AssertionError, "already registered"),
        (hook_that_is_none, ValueError, "must be callable"),
    ),
    refused(
        chapter.must(
            "fsdp/optimizer-state-by-number",
            "optim_state_dict_to_load raises an error on every rank if the keys of the state are "
            "numbers instead of names, since the optimizer would take them for its own.",
            source="torch 2.13, _rekey_sharded_optim_state_dict",
        ),
        (numbered_state, Exception, ""),
    ),
]


@world_sizes(2)
@pytest.mark.parametrize("refusals", REFUSED)
def test_refused(ranks: Ranks, refusals: tuple[Refusal, ...]) -> None:
    for function, kind, words in refusals:
        assert_raised(ranks.outcomes(function), kind, match=words, what=function.__name__)


def hook_for_replicas(me: Me) -> None:
    model = wrap(me, layer(), sharding_strategy=HYBRID, process_group=halves(me))
    model.register_comm_hook(None, print)


@covers("fsdp/comm-hook-refused")
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
    "Wrapping a ModuleList or ModuleDict warns that it will not be gathered.",
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


def said_of_a_part(me: Me, orig: bool) -> str:
    """What is said of a unit in which one nested layer is frozen and another is trained."""
    part = nn.Sequential(layer(), nn.Sequential(layer().requires_grad_(False)))
    policy = CustomPolicy(lambda module: module is part)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            wrap(me, nn.Sequential(part), auto_wrap_policy=policy, use_orig_params=orig)
        except ValueError as error:
            return str(error)
    return "\n".join(str(warning.message) for warning in caught if orig)


@chapter.should(
    "fsdp/frozen-and-trained-by-name",
    "If a policy puts frozen and trained parameters into one unit, the error without original "
    "parameters, and the warning with them, names the unit, and its parameters of both kinds.",
)
@world_sizes(2)
@both_kinds
def test_frozen_and_trained_parameters_are_named(ranks: Ranks, orig: bool) -> None:
    for rank, said in enumerate(ranks.run(said_of_a_part, orig)):
        trained, _, frozen = said.partition("requires_grad=False:")
        for names, of in ((trained, "0.0"), (frozen, "0.1.0")):
            wanted = [f"'{of}.weight'", f"'{of}.bias'"]
            assert_that(all(name in names for name in wanted), f"{wanted} are not in: {said}", rank)

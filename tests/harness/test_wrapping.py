"""Wrappers that have only some of torch's arguments: what they are called with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.nn.parallel import DistributedDataParallel

from conformance.harness.wrapping import LacksArgument, arguments_for
from conformance.target import Target, TargetError, load_target
from conformance.verdict import Verdict
from tests.harness.kit import run_inside

HERE = "tests.harness.test_wrapping"


class Narrow(DistributedDataParallel):
    """Has one of torch's arguments."""

    def __init__(self, module: nn.Module, bucket_cap_mb: float | None = None) -> None:
        super().__init__(module, bucket_cap_mb=bucket_cap_mb)


NARROW = Target(name="narrow", backend="gloo", ddp=f"{HERE}:Narrow")


def any_keyword(module: nn.Module, **kwargs: Any) -> None:
    pass


def taken(
    wrapper: Any, given: dict[str, Any], named: tuple[str, ...] | None = None
) -> dict[str, Any]:
    return arguments_for(wrapper, DistributedDataParallel, given, named)


def test_an_argument_with_torchs_default_is_not_passed_to_a_wrapper_that_may_lack_it() -> None:
    defaults = {"find_unused_parameters": False, "process_group": None}
    assert taken(Narrow, defaults) == {}
    assert taken(any_keyword, defaults) == {}
    assert taken(any_keyword, {"find_unused_parameters": True}) == {"find_unused_parameters": True}
    assert taken(Narrow, {"bucket_cap_mb": None}) == {"bucket_cap_mb": None}, "it may differ there"


def test_another_value_of_an_argument_that_the_wrapper_lacks_is_refused() -> None:
    with pytest.raises(LacksArgument, match="Narrow has no argument 'static_graph'"):
        taken(Narrow, {"static_graph": True})


def test_a_target_says_which_arguments_its_wrapper_has() -> None:
    assert taken(any_keyword, {"bucket_cap_mb": 1}, ("bucket_cap_mb",)) == {"bucket_cap_mb": 1}
    assert taken(any_keyword, {"static_graph": False}, ()) == {}
    with pytest.raises(LacksArgument):
        taken(any_keyword, {"static_graph": True}, ("bucket_cap_mb",))
    with pytest.raises(LacksArgument):
        taken(Narrow, {"bucket_cap_mb": 1}, ())


def test_full_shard_is_what_fsdp_does_without_a_strategy() -> None:
    def shards(module: nn.Module) -> None:
        pass

    full = {"sharding_strategy": ShardingStrategy.FULL_SHARD}
    assert arguments_for(shards, FullyShardedDataParallel, full, None) == {}
    no_shard = {"sharding_strategy": ShardingStrategy.NO_SHARD}
    with pytest.raises(LacksArgument):
        arguments_for(shards, FullyShardedDataParallel, no_shard, None)


def test_arguments_are_declared_in_the_targets_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    head = 'name = "mine"\nbackend = "gloo"\nddp = "m:C"\n[arguments]\n'
    file.write_text(head + 'ddp = ["bucket_cap_mb"]\n')
    assert load_target(str(file)).arguments == {"ddp": ("bucket_cap_mb",)}
    file.write_text(head + 'dpp = ["bucket_cap_mb"]\n')
    with pytest.raises(TargetError, match="arguments: unknown wrapper 'dpp'; there are ddp, fsdp"):
        load_target(str(file))
    file.write_text(head + 'ddp = "bucket_cap_mb"\n')
    with pytest.raises(TargetError, match="arguments: ddp must be a list of strings"):
        load_target(str(file))


CASES = """
import torch
from conformance import covers, world_sizes
from conformance.harness.outcome import Raised
from conformance.rule import MUST, Requirement

def r(name):
    words = dict(level=MUST, profile="ddp", says="It works.", source="a test")
    return Requirement(id=f"mine/{name}", **words)

def wrap(me, arguments):
    model = me.ddp(torch.nn.Linear(2, 1), **arguments)
    model(torch.ones(1, 2)).sum().backward()
    return model.module.weight.grad

@covers(r("defaults"))
@world_sizes(2)
def test_defaults(ranks):
    ranks.run(wrap, {"find_unused_parameters": False, "bucket_cap_mb": 1})

@covers(r("more"))
@world_sizes(2)
def test_more(ranks):
    ranks.run(wrap, {"find_unused_parameters": True})

@covers(r("refused"))
@world_sizes(2)
def test_refused(ranks):
    assert all(isinstance(o, Raised) for o in ranks.outcomes(wrap, {"static_graph": True}))
"""


@pytest.mark.usefixtures("warm_ranks")
def test_a_case_that_needs_more_than_the_wrapper_has_is_not_claimed(tmp_path: Path) -> None:
    (tmp_path / "test_arguments.py").write_text(CASES)
    run = run_inside(tmp_path, f"--target={HERE}:NARROW")
    assert run.result("mine/defaults").verdict is Verdict.HOLDS
    assert run.result("mine/more").verdict is Verdict.NOT_CLAIMED
    says = "not claimed: Narrow has no argument 'find_unused_parameters'"
    assert run.result("mine/more").reason == says
    assert run.result("mine/refused").verdict is Verdict.NOT_CLAIMED, "it refused nothing"
    assert run.exit_status == 0

"""A run on a type of device that torch does not know before the target's modules are imported."""

from __future__ import annotations

import json

import pytest
from torch.utils import backend_registration

from conformance.report.schema import load_schema, violations
from tests.harness.kit import Outside

pytest_plugins = ["pytester"]

pytestmark = pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this torch cannot register a device from Python",
)

TARGET = """
name = "hosted"
backend = "hosted"
imports = ["tests.harness.python_device"]
device = "pydev"

[[deviations]]
requirements = ["mine/wrong"]
reason = "said of this device"
device = "pydev"

[[deviations]]
requirements = ["mine/right"]
reason = "said of another device"
device = "xpu"
"""

CASES = """
import torch
import torch.distributed as dist
from conformance import Requirement, assert_each_rank, covers, gpu, world_sizes
from conformance.harness.traces import record
from conformance.rule import MUST

def r(name):
    return Requirement(id=f"mine/{name}", level=MUST, profile="collectives", says="It holds.",
                       source="this test")

def where(me):
    return me.device, me.target.device, torch.pydev.current, torch.pydev.seed == me.seed

def total(me):
    x = torch.full((3,), me.rank + 1.0, device=me.device)
    assert x.device.type == "pydev"
    dist.all_reduce(x)
    return x

def traced(me):
    group = record()
    dist.all_reduce(torch.full((3,), 1.0, device=me.device), group=group)
    return [str(issued) for issued in group.take()]

@covers(r("told"))
@world_sizes(3)
def test_told(ranks):
    assert ranks.device == "pydev"
    want = [(f"pydev:{n % 2}", "pydev", n % 2, True) for n in range(3)]
    assert_each_rank(ranks.run(where), want)

@covers(r("right"))
@world_sizes(2)
@gpu(2)
def test_right(ranks):
    assert_each_rank(ranks.run(total), [torch.full((3,), 3.0)] * 2)

@covers(r("traced"))
@world_sizes(2)
def test_traced(ranks):
    assert_each_rank(ranks.run(traced), [["all_reduce(float32[3])"]] * 2)

@covers(r("wrong"))
@world_sizes(2)
def test_wrong(ranks):
    assert_each_rank(ranks.run(total), [torch.full((3,), 4.0)] * 2)

@covers(r("many"))
@world_sizes(2)
@gpu(3)
def test_many(ranks):
    ranks.run(total)
"""


@pytest.fixture
def outside(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Outside:
    pytester.makefile(".toml", hosted=TARGET)
    pytester.makepyfile(test_it=CASES)
    return Outside(pytester, monkeypatch)


def test_ranks_use_a_device_that_only_the_targets_modules_bring(outside: Outside) -> None:
    run = outside.run("--target=hosted.toml", "--repetitions=0")
    names = ("told", "right", "traced", "wrong", "many")
    assert {name: run.verdict(f"mine/{name}") for name in names} == {
        "told": "holds",
        "right": "holds",
        "traced": "holds",
        "wrong": "deviation",
        "many": "not exercised",
    }, run.out
    assert "needs 3 pydev devices, and there are 2" in run.row("mine/many")["reason"]
    assert run.certificate is not None
    assert run.certificate["target"]["device"] == run.certificate["run"]["device"] == "pydev"
    assert run.certificate["environment"]["devices"] == ["Python device 0", "Python device 1"]
    assert list(violations(json.loads(json.dumps(run.certificate)), load_schema())) == []


def test_the_option_device_takes_such_a_type(outside: Outside) -> None:
    path = outside.pytester.path / "hosted.toml"
    path.write_text(path.read_text().replace('device = "pydev"\n\n[[', "\n[[", 1))
    run = outside.run("--target=hosted.toml", "--device=pydev", "--repetitions=0", "-k", "told")
    assert run.verdict("mine/told") == "holds", run.out
    refused = outside.run("--target=hosted.toml", "--device=other")
    assert refused.exit_status == 2
    assert "torch knows no device of type 'other'" in refused.out + refused.err

"""`Me`: what a rank's function can ask about its target."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from conformance.harness.me import Me
from conformance.target import Target


class TakesDevice(torch.nn.Module):
    def __init__(self, module: torch.nn.Module, *, device_id: Any = None) -> None:
        super().__init__()
        self.given = {"device_id": device_id}


class TakesAnything(torch.nn.Module):
    def __init__(self, module: torch.nn.Module, **kwargs: Any) -> None:
        super().__init__()
        self.given = kwargs


class TakesNothing(torch.nn.Module):
    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.given: dict[str, Any] = {}


CPU = torch.device("cpu")


def me_with(wrapper: type) -> Me:
    target = Target(name="x", backend="gloo", fsdp=f"{__name__}:{wrapper.__name__}")
    return Me(0, 1, CPU, target, dist.HashStore(), seed=0, group_timeout_s=1.0)


@pytest.mark.parametrize(
    ("wrapper", "given"),
    [
        (TakesDevice, {"device_id": CPU}),
        (TakesAnything, {"device_id": CPU}),
        (TakesNothing, {}),
    ],
)
def test_an_fsdp_that_can_take_its_device_is_given_it(
    wrapper: type, given: dict[str, object]
) -> None:
    assert me_with(wrapper).fsdp(torch.nn.Linear(1, 1)).given == given


def test_a_case_may_choose_the_device_of_fsdp() -> None:
    meta = torch.device("meta")
    assert me_with(TakesAnything).fsdp(torch.nn.Linear(1, 1), device_id=meta).given == {
        "device_id": meta
    }

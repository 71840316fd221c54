"""Calls of torch that fail for want of something that the device lacks are told from others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from conformance.harness.device_lacks import LacksOperator, watching
from conformance.harness.outcome import Refusal

LACKING = (
    *("dtype:float64", "device:streams", "device:events", "device:pinned_memory"),
    *("device:resizable_storage", "device:moved_data"),
)


def noted(call: Callable[[], object], lacks: tuple[str, ...] = LACKING) -> list[Refusal]:
    """What is told when a call raises on a device that lacks so much."""
    told: list[Refusal] = []
    with pytest.raises((RuntimeError, AttributeError)), watching("mtia", lacks, told.append):
        call()
    return told


def fail(refusal: Refusal) -> None:
    raise AssertionError(refusal.said)


def assign_data() -> None:
    torch.ones(1, requires_grad=True).data = torch.ones(1).to_sparse()


def without(name: str) -> Callable[[], object]:
    return lambda: getattr(torch.get_device_module("mtia"), name)


@pytest.fixture
def bare_module(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = type(torch)("torch.mtia")
    monkeypatch.setattr(torch, "get_device_module", lambda type: module)


@pytest.mark.parametrize(
    ("call", "needs"),
    [
        (lambda: torch.ones(2, dtype=torch.float64).view(3), "dtype:float64"),
        (lambda: torch.empty(-1, dtype=torch.float64), "dtype:float64"),
        (lambda: torch.stack([torch.ones(1).double(), torch.ones(2)]), "dtype:float64"),
        (lambda: torch.empty(-1, pin_memory=True), "device:pinned_memory"),
        (lambda: torch.ones(1).untyped_storage().resize_(-8), "device:resizable_storage"),
        (assign_data, "device:moved_data"),
        (without("Stream"), "device:streams"),
        (without("Event"), "device:events"),
    ],
)
def test_what_is_asked_for_and_lacking_is_noted(
    call: Callable[[], object], needs: str, bare_module: None
) -> None:
    [refusal] = noted(call)
    assert refusal.needs == (needs,)
    assert " raised " in refusal.said
    assert noted(call, tuple({*LACKING} - {needs})) == [], "the device has it"


@pytest.mark.parametrize(
    "call", [lambda: torch.ones(2).view(3), without("memory_stats")], ids=["float32", "statistics"]
)
def test_other_errors_are_not(call: Callable[[], object], bare_module: None) -> None:
    assert noted(call) == []


def test_nothing_of_it_stays() -> None:
    noted(lambda: torch.ones(2).view(3))
    assert "resize_" not in vars(torch.UntypedStorage)


@pytest.mark.parametrize("lacks", [(), LACKING], ids=["nothing", "much"])
def test_an_operator_that_the_device_does_not_have_is_named(lacks: tuple[str, ...]) -> None:
    batch = torch.ones(2, 2)
    with (
        pytest.raises(LacksOperator, match="'mtia' has no operator aten::batch_norm_stats"),
        watching("mtia", lacks, fail),
    ):
        torch.batch_norm_stats(batch, 1e-5)
    # The host has what torch has; there it is an error as any other.
    with pytest.raises(NotImplementedError), watching("cpu", lacks, fail):
        torch.batch_norm_stats(batch, 1e-5)


def test_what_else_is_not_implemented_is_an_error_as_any_other() -> None:
    with pytest.raises(NotImplementedError), watching("mtia", (), fail):
        raise NotImplementedError("reduce_scatter")


def test_an_error_of_torch_that_names_pinned_memory_asks_for_it() -> None:
    class Reducer(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            raise RuntimeError("implement getPinnedMemoryAllocator")

    y: Any = Reducer.apply(torch.ones(1, requires_grad=True))  # type: ignore[no-untyped-call]  # torch says no types
    [refusal] = noted(lambda: y.sum().backward())
    assert refusal.needs == ("device:pinned_memory",)

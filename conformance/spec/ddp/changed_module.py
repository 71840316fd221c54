"""DDP whose module has other parameters than when it was wrapped: no gradient is silently local."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

from conformance import Chapter, Me, Ranks, assert_that, world_sizes
from conformance.spec.ddp.models import Scaled

chapter = Chapter(
    "ddp",
    source="torch 2.13 docs, DistributedDataParallel: parameters after wrapping; pytorch#12603",
)

MEAN = 2.0  # of the inputs of two ranks, which are the gradients


class Two(nn.Module):
    """The gradients of `first`, and of `second` if it is there and trained, are the input."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Scaled("float32")
        self.second: nn.Module | None = Scaled("float32")

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.first(x)
        return y if self.second is None else y + self.second(x)


def replace_parameter(module: Two) -> nn.Parameter:
    module.first.weight = nn.Parameter(module.first.weight.detach() + 1)
    return module.first.weight


def replace_layer(module: Two) -> nn.Parameter:
    module.second = made = Scaled("float32").to(module.first.weight.device)
    return made.weight


def thaw(module: Two) -> nn.Parameter:
    assert module.second is not None
    module.second.requires_grad_(True)
    return module.second.get_parameter("weight")


CHANGES = {
    "replaced": replace_parameter,
    "layer-replaced": replace_layer,
    "thawed": thaw,
    "added": replace_layer,
}


def gradient_after(me: Me, change: str, search: bool) -> str | Tensor:
    """The gradient of the parameter that has come; or what was said of it instead."""
    module = Two().to(me.device)
    if change == "added":
        module.second = None
    elif change == "thawed" and module.second is not None:
        module.second.requires_grad_(False)
    model = me.ddp(module, find_unused_parameters=search)
    x = torch.full((3,), MEAN - 1 + 2 * me.rank, device=me.device)
    model(x).backward()
    module.zero_grad()
    new = CHANGES[change](module)
    name = next(name for name, param in module.named_parameters() if param is new)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            model(x).backward()
        except (RuntimeError, ValueError) as error:
            return str(error)
    assert new.grad is not None
    return next((text for w in said if name in (text := str(w.message))), new.grad)


with_and_without_search = pytest.mark.parametrize("search", [False, True], ids=["plain", "search"])


def check_change(ranks: Ranks, change: str, search: bool) -> None:
    for rank, got in enumerate(ranks.run(gradient_after, change, search)):
        if isinstance(got, Tensor):
            is_mean = bool((got == MEAN).all())
            assert_that(is_mean, f"gradient {got.tolist()} is not averaged, silently", rank)


@chapter.should(
    "ddp/changed/replaced",
    "Gradients of a parameter that has replaced another one since the module was wrapped, alone or "
    "with its layer, are averaged, or a warning names it, or the step is refused; they never "
    "silently stay local.",
    rests_on="ddp/average",
)
@world_sizes(2)
@with_and_without_search
@pytest.mark.parametrize("change", ["replaced", "layer-replaced"])
def test_a_parameter_that_was_replaced(ranks: Ranks, change: str, search: bool) -> None:
    check_change(ranks, change, search)


@chapter.should(
    "ddp/changed/thawed",
    "Gradients of a parameter that required none when the module was wrapped, and is trained "
    "later, are averaged, or a warning names it, or the step is refused; they never silently stay "
    "local.",
    rests_on="ddp/average",
)
@world_sizes(2)
@with_and_without_search
def test_a_parameter_that_was_thawed(ranks: Ranks, search: bool) -> None:
    check_change(ranks, "thawed", search)


@chapter.should(
    "ddp/changed/added",
    "Gradients of a layer that is added to the module after it was wrapped are averaged, or a "
    "warning names its parameters, or the step is refused; they never silently stay local.",
    rests_on="ddp/average",
)
@world_sizes(2)
@with_and_without_search
def test_a_layer_that_was_added(ranks: Ranks, search: bool) -> None:
    check_change(ranks, "added", search)

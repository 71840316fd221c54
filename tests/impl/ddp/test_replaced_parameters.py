"""DDP reports parameters that were replaced after the module was wrapped, and only those."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

from tests.impl.ddp.models import DDP, TwoLayers, X

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture(params=[{}, {"find_unused_parameters": True}], ids=["plain", "search"])
def wrapped(request: pytest.FixtureRequest) -> Iterator[Any]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "find_unused_parameters=True was specified")
        yield DDP(TwoLayers(), **request.param)


def reload(wrapped: Any) -> None:
    state = {name: tensor.clone() for name, tensor in wrapped.state_dict().items()}
    wrapped.load_state_dict(state, assign=True)


def test_replaced_parameters_are_told_of_once(wrapped: Any) -> None:
    reload(wrapped)
    loss = wrapped(X).sum()
    with pytest.warns(UserWarning, match=r"first\.weight was replaced") as caught:
        loss.backward(retain_graph=True)
    assert [warning.filename for warning in caught] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss.backward()


def test_a_layer_that_was_replaced_is_told_of_if_unused_parameters_are_searched_for() -> None:
    wrapped = DDP(TwoLayers(), find_unused_parameters=True)
    wrapped.module.second = nn.Linear(2, 2)
    loss = wrapped(X).sum()
    with pytest.warns(UserWarning, match=r"second\.weight was replaced"):
        loss.backward()


@pytest.mark.parametrize("change", ["thawed", "added"])
def test_parameters_that_are_trained_later_are_told_of(change: str) -> None:
    module = TwoLayers()
    module.second.requires_grad_(change != "thawed")
    wrapped = DDP(module)
    wrapped(X).sum().backward()
    module.second.requires_grad_(True)
    if change == "added":
        module.second.append_to = nn.Linear(1, 1)
    loss = wrapped(X).sum()
    with pytest.warns(UserWarning, match=r"second\..*weight was added to the module, or began to"):
        loss.backward()


def swap_layers(wrapped: Any) -> None:
    module = wrapped.module
    module.first, module.second = module.second, module.first


def call_with_others(wrapped: Any) -> None:
    others: dict[str, Tensor] = {
        name: nn.Parameter(param.detach()) for name, param in wrapped.named_parameters()
    }
    torch.func.functional_call(wrapped, others, (X,)).sum().backward()


def freeze_others(wrapped: Any) -> None:
    reload(wrapped)
    wrapped.requires_grad_(False)


UNTOLD: dict[str, Callable[[Any], Any]] = {
    "pruned": lambda wrapped: prune.l1_unstructured(wrapped.module.first, "weight", 0.5),
    "parametrized": lambda wrapped: parametrizations.spectral_norm(wrapped.module.first),
    "converted": lambda wrapped: wrapped.double().float(),
    "frozen": freeze_others,
    "swapped": swap_layers,
    "called with others": call_with_others,
}


@pytest.mark.parametrize("change", UNTOLD.values(), ids=UNTOLD)
def test_what_is_still_there_was_not_replaced(wrapped: Any, change: Callable[[Any], Any]) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".* was replaced")
        for _ in range(2):
            wrapped(X.clone().requires_grad_()).sum().backward()
            wrapped.zero_grad()
        change(wrapped)
        for _ in range(2):
            wrapped(X.clone().requires_grad_()).sum().backward()
            wrapped.zero_grad()

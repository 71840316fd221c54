"""Backward passes that reach only some parameters, or none, and what the next forward says."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from impl.ddp.timing import ALWAYS_SAMPLED_ITERATIONS
from tests.impl.ddp.models import DDP, Branches, TwoLayers, X, grad_of, same_gradients

pytestmark = pytest.mark.usefixtures("one_rank")


class Recomputed(Branches):
    """The first layer runs twice, the others not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.third = nn.Linear(2, 2, bias=False)

    def forward(self, x: Tensor, both: bool = False) -> Any:
        for _ in range(2):
            x = checkpoint(self.first, x, use_reentrant=True)
        return x


def test_what_is_ready_twice_is_named_at_once_in_the_first_iterations() -> None:
    wrapped = DDP(Recomputed())
    loss = wrapped(X.clone().requires_grad_()).sum()
    with pytest.raises(RuntimeError, match="mark a variable ready only once"):
        loss.backward()


def test_what_was_ready_twice_is_named_if_only_the_next_forward_notices() -> None:
    wrapped = DDP(Recomputed())
    x = X.clone().requires_grad_()
    for _ in range(ALWAYS_SAMPLED_ITERATIONS):
        wrapped(x)
    wrapped(x).sum().backward()
    with pytest.raises(RuntimeError, match="mark a variable ready only once") as caught:
        wrapped(x)
    assert "Parameter at index 0 with name first.weight" in str(caught.value)
    with pytest.raises(RuntimeError, match="Expected to have finished reduction"):
        wrapped(x)


def test_backward_may_be_told_to_reach_inputs_only() -> None:
    model = nn.Linear(2, 1, bias=False)
    wrapped = DDP(model)
    x = X.clone().requires_grad_()
    first, second = wrapped(x), wrapped(x)
    first.sum().backward()
    second.sum().backward(inputs=[x])
    wrapped(x).sum().backward()
    assert grad_of(model.weight).tolist() == [[2, 4]]
    assert wrapped.reducer.has_rebuilt_buckets


def test_a_forward_before_the_rebuild_may_be_walked_after_it() -> None:
    model = nn.Linear(2, 1, bias=False)
    wrapped = DDP(model)
    first, second = wrapped(X), wrapped(X)
    first.sum().backward()
    third = wrapped(X)
    second.sum().backward()
    assert wrapped.reducer.reduced_bucket_count == 1
    third.sum().backward()
    assert wrapped.reducer.reduced_bucket_count == 1
    assert grad_of(model.weight).tolist() == [[3, 6]]


def penalised(wrapped: Any, x: Tensor) -> Any:
    """The loss of a critic whose gradient with respect to its input is held at length 1."""
    output = wrapped(x)
    (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    return output.sum() + (slope.norm() - 1).square()


@pytest.mark.parametrize("options", [{}, {"static_graph": True}], ids=str)
def test_a_gradient_penalty_may_come_before_the_first_backward(options: dict[str, Any]) -> None:
    model = TwoLayers()
    alone = copy.deepcopy(model)
    wrapped = DDP(model, **options)
    x = X.clone().requires_grad_()
    for _ in range(3):
        for module in (wrapped, alone):
            module.zero_grad()
            penalised(module, x).backward()
        assert same_gradients(model, alone)
        assert wrapped.reducer.reduced_bucket_count == 1


def test_a_static_graph_may_leave_out_all_parameters() -> None:
    class Bypass(Branches):
        def forward(self, x: Tensor, both: bool = False) -> Any:
            return x * 2

    wrapped = DDP(Bypass(), static_graph=True)
    for _ in range(2):
        wrapped(X.clone().requires_grad_()).sum().backward()
        assert wrapped.reducer.unused_params == [0, 1]
        assert wrapped.reducer.reduced_bucket_count == 1

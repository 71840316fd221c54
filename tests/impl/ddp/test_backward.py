"""Backward passes of all kinds, in a group of one rank."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from impl.ddp import GradBucket
from impl.torch_private import TorchDDP
from tests.impl.ddp.models import (
    DDP,
    Branches,
    FutureTensor,
    TwoLayers,
    X,
    grad_of,
    unchanged,
)

pytestmark = pytest.mark.usefixtures("one_rank")


def test_torch_takes_it_for_its_own() -> None:
    assert isinstance(DDP(nn.Linear(1, 1)), TorchDDP)
    assert not isinstance(nn.Linear(1, 1), TorchDDP)


# ---- parameters that go unused


def test_torchs_own_code_may_ask_whether_a_reduction_is_finished() -> None:
    wrapped = DDP(Branches())
    wrapped(X).sum().backward()
    with pytest.raises(RuntimeError, match="Expected to have finished reduction"):
        wrapped._check_reducer_finalized()


def test_undefined_gradients_of_custom_functions_count_as_ready() -> None:
    class NoGradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            return x + 0 * weight.sum()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
            return grad, None

    class Model(Branches):
        def forward(self, x: Tensor, both: bool = False) -> Any:
            apply: Any = NoGradient.apply
            return apply(self.first(x), self.second.weight)

    model = Model()
    wrapped = DDP(model)
    for _ in range(2):
        wrapped(X).sum().backward()
    assert grad_of(model.second.weight).eq(0).all()


# ---- graphs that are walked in other ways than once from end to end


@pytest.mark.filterwarnings(r"ignore:Using backward\(\) with create_graph=True")
@pytest.mark.parametrize("view", [False, True])
def test_create_graph_keeps_higher_order_gradients(
    view: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = TwoLayers()
    wrapped = DDP(model, gradient_as_bucket_view=view)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            wrapped.zero_grad()
            wrapped(X).square().sum().backward(create_graph=True)
    grad = grad_of(model.first.weight)
    assert grad.requires_grad
    assert torch.autograd.grad(grad.sum(), model.first.weight)[0].abs().sum() > 0
    assert "higher-order gradient will  not be synchronized" in caplog.text
    assert "please ping https://github.com/pytorch/pytorch/issues/63929" in caplog.text


def test_no_sync_leaves_the_reducer_alone_and_does_not_pile_up() -> None:
    model = nn.Linear(2, 1, bias=False)
    wrapped = DDP(model)
    with wrapped.no_sync():
        for _ in range(5):
            wrapped(X).sum().backward()
    assert wrapped.reducer.iteration == 0
    assert len(wrapped.reducer._arrivals.indices) <= 1
    wrapped(X).sum().backward()
    assert grad_of(model.weight).tolist() == [[6, 12]]
    assert wrapped.reducer.iteration == 1


@pytest.mark.filterwarnings("ignore:find_unused_parameters=True was specified")
@pytest.mark.parametrize("order", ["dropped", "later", "first", "together"])
@pytest.mark.parametrize("find_unused_parameters", [False, True])
def test_each_backward_belongs_to_its_own_forward(order: str, find_unused_parameters: bool) -> None:
    """The output of a forward outside no_sync, and what becomes of it beside one inside."""
    model = nn.Linear(2, 1, bias=False)
    wrapped = DDP(model, find_unused_parameters=find_unused_parameters)
    outside = wrapped(X).sum()
    with wrapped.no_sync():
        inside = wrapped(X).sum()
    if order == "together":
        (outside + inside).backward()
    elif order == "first":
        outside.backward()
        inside.backward()
    else:
        inside.backward()
        assert wrapped.reducer.reduced_bucket_count == 0
        if order == "later":
            outside.backward()
    assert wrapped.reducer.reduced_bucket_count == int(order != "dropped")
    assert grad_of(model.weight).tolist() == [[1, 2] if order == "dropped" else [2, 4]]


# ---- models that change, wrappers that go


def test_a_converted_model_goes_on_being_synchronised(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(2, 1, bias=False)
    wrapped = DDP(model)
    wrapped(X).sum().backward()
    model.double().float()
    for _ in range(2):
        wrapped(X).sum().backward()
        assert wrapped.reducer.reduced_bucket_count == 1
    model.double()
    wrapped.zero_grad()
    wrapped(X.double()).sum().backward()
    buffer = wrapped.reducer.buckets[0].buffer
    assert buffer is not None
    assert buffer.dtype is torch.float64
    assert caplog.text.count("hooking them anew") == 2


def test_a_dropped_wrapper_takes_its_hooks_along() -> None:
    fired: list[int] = []

    def hook(state: list[int], bucket: GradBucket) -> FutureTensor:
        state.append(bucket.index())
        return unchanged(bucket)

    model = nn.Linear(2, 1, bias=False)
    first = DDP(model)
    first.register_comm_hook(fired, hook)
    first(X).sum().backward()
    assert fired == [0]
    del first
    DDP(model)(X).sum().backward()
    assert fired == [0]


# ---- kinds of gradients


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"0.weight": [1]}, r"does not list|gradient size mismatch.*rows \[4\]"),
        ({"0.weight": []}, "Sparse metadata and gradient size mismatch"),
        ({"other": [1, 4]}, r"param: 0\.weight not found in sparse metadata"),
    ],
)
def test_sparse_metadata_must_fit(metadata: dict[str, list[int]], message: str) -> None:
    wrapped = DDP(nn.Sequential(nn.Embedding(6, 2, sparse=True)))
    rows = {name: torch.tensor(indices, dtype=torch.int64) for name, indices in metadata.items()}
    wrapped._set_sparse_metadata(rows)
    loss = wrapped(torch.tensor([1, 4])).sum()
    with pytest.raises(RuntimeError, match=message):
        loss.backward()

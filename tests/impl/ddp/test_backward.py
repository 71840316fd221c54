"""Backward passes of all kinds, in a group of one: everything but the meeting of ranks."""

from __future__ import annotations

import copy
import logging
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from impl.ddp import GradBucket
from impl.torch_private import TorchDDP
from tests.impl.ddp.models import (
    DDP,
    Branches,
    FutureTensor,
    TwoHeads,
    TwoLayers,
    X,
    grad_of,
    same_gradients,
    unchanged,
)

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.mark.parametrize("option", ["", "gradient_as_bucket_view", "static_graph"])
def test_gradients_are_those_of_the_module(option: str) -> None:
    model = TwoLayers()
    alone = copy.deepcopy(model)
    options: dict[str, Any] = {option: True} if option else {}
    wrapped = DDP(model, **options)
    for _ in range(3):
        wrapped(X).square().sum().backward()
        alone(X).square().sum().backward()
        assert same_gradients(model, alone)


def test_torch_takes_it_for_its_own() -> None:
    assert isinstance(DDP(nn.Linear(1, 1)), TorchDDP)
    assert not isinstance(nn.Linear(1, 1), TorchDDP)


def test_bucket_views_are_the_gradients_and_survive_zero_grad() -> None:
    model = nn.Linear(2, 2)
    wrapped = DDP(model, gradient_as_bucket_view=True)
    for set_to_none in (True, False):
        for _ in range(3):
            wrapped(X).sum().backward()
            (bucket,) = wrapped.reducer.buckets
            grads = [param.grad for param in model.parameters()]
            views = {view.data_ptr() for view in bucket.views}
            assert {grad.data_ptr() for grad in grads if grad is not None} == views
            wrapped.zero_grad(set_to_none=set_to_none)


# ---- parameters that go unused


def test_unused_parameters_are_an_error_at_the_next_forward() -> None:
    wrapped = DDP(Branches())
    wrapped(X).sum().backward()
    with pytest.raises(RuntimeError, match="Expected to have finished reduction") as caught:
        wrapped(X)
    assert "did not receive grad for rank 0: 1\n" in str(caught.value)
    assert wrapped._get_ddp_logging_data()["has_error"] == 1
    with pytest.raises(RuntimeError, match="Expected to have finished reduction"):
        wrapped._check_reducer_finalized()


def test_missing_gradients_are_named_at_debug_level(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_debug_level", lambda: dist.DebugLevel.INFO)
    wrapped = DDP(Branches())
    wrapped(X).sum().backward()
    with pytest.raises(RuntimeError, match=r"did not receive grad for rank 0: second\.weight"):
        wrapped(X)


def test_unused_parameters_keep_their_gradient() -> None:
    model = Branches()
    wrapped = DDP(model, find_unused_parameters=True)
    wrapped(X).sum().backward()
    assert model.second.weight.grad is None
    kept = torch.ones(2, 2)
    model.second.weight.grad = kept
    wrapped(X).sum().backward()
    assert model.second.weight.grad is kept
    assert kept.eq(1).all()
    wrapped(X)
    assert wrapped._get_ddp_logging_data()["unused_parameter_size"] == 16


@pytest.mark.filterwarnings("ignore:find_unused_parameters=True was specified")
def test_an_output_that_the_loss_leaves_out_is_no_error_with_the_search() -> None:
    model = TwoHeads()
    wrapped = DDP(model, find_unused_parameters=True)
    for _ in range(3):
        wrapped(X)["first"].sum().backward()
        assert model.second.weight.grad is None


def test_a_parameter_used_behind_the_back_of_the_search_is_ready_twice() -> None:
    class Leaks(Branches):
        def forward(self, x: Tensor, both: bool = False) -> Any:
            return self.first(x), self.second

    wrapped = DDP(Leaks(), find_unused_parameters=True)
    x, second = wrapped(X)
    loss = second(x).sum()
    with pytest.raises(RuntimeError, match="Expected to mark a variable ready only once") as caught:
        loss.backward()
    assert "Parameter at index 1 with name second.weight" in str(caught.value)


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


def test_reentrant_checkpoints_of_one_layer_need_a_static_graph() -> None:
    class Recomputed(Branches):
        def forward(self, x: Tensor, both: bool = False) -> Any:
            for _ in range(2):
                x = checkpoint(self.first, self.second(x), use_reentrant=True)
            return x

    x = X.clone().requires_grad_()
    dynamic = DDP(Recomputed())
    loss = dynamic(x).sum()
    with pytest.raises(RuntimeError, match="Expected to mark a variable ready only once"):
        loss.backward()
    model = Recomputed()
    alone = copy.deepcopy(model)
    wrapped = DDP(model, static_graph=True)
    for _ in range(3):
        wrapped(x).sum().backward()
        alone(x).sum().backward()
        assert same_gradients(model, alone)


def test_several_forwards_and_one_backward() -> None:
    model = nn.Linear(2, 1)
    wrapped = DDP(model)
    for _ in range(2):
        (wrapped(X) + wrapped(2 * X)).sum().backward()
    assert grad_of(model.weight).tolist() == [[6, 12]]


def test_a_graph_may_be_walked_twice() -> None:
    model = nn.Linear(2, 1, bias=False)
    wrapped = DDP(model)
    for _ in range(2):
        wrapped.zero_grad()
        loss = wrapped(X).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        assert grad_of(model.weight).tolist() == [[2, 4]]


def test_autograd_grad_leaves_gradients_and_the_reducer_alone() -> None:
    model = nn.Linear(2, 1, bias=False)
    wrapped = DDP(model)
    for _ in range(3):
        (grad,) = torch.autograd.grad(wrapped(X).sum(), model.weight)
        assert grad.tolist() == [[1, 2]]
        assert model.weight.grad is None
    wrapped(X).sum().backward()
    assert grad_of(model.weight).tolist() == [[1, 2]]


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


def test_backward_on_another_thread() -> None:
    model = nn.Linear(2, 1, bias=False)
    wrapped = DDP(model)
    for _ in range(2):
        wrapped.zero_grad()
        loss = wrapped(X).sum()
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
        assert grad_of(model.weight).tolist() == [[1, 2]]


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


# ---- static graphs


def test_static_graph_may_begin_inside_no_sync() -> None:
    model = nn.Linear(2, 1, bias=False)
    wrapped = DDP(model, static_graph=True)
    for _ in range(3):
        wrapped.zero_grad()
        with wrapped.no_sync():
            wrapped(X).sum().backward()
        wrapped(X).sum().backward()
        assert wrapped.reducer.reduced_bucket_count == 1
        assert grad_of(model.weight).tolist() == [[2, 4]]


def test_a_static_graph_may_leave_a_branch_out_for_good() -> None:
    model = TwoHeads()
    wrapped = DDP(model, static_graph=True)
    for _ in range(6):
        wrapped(X)["first"].sum().backward()
    assert model.second.weight.grad is None


@pytest.mark.parametrize("uses", [(False, False, True), (True, True, False, True)])
def test_a_static_graph_that_changes_is_an_error(uses: tuple[bool, ...]) -> None:
    wrapped = DDP(Branches(), static_graph=True)

    def train() -> None:
        for both in uses:
            wrapped(X, both=both).sum().backward()

    with pytest.raises(RuntimeError, match="training graph has changed in this iteration"):
        train()


def test_static_graph_is_set_once_and_in_time() -> None:
    wrapped = DDP(Branches(), static_graph=True)
    with pytest.warns(UserWarning, match="no need to set it again"):
        wrapped._set_static_graph()
    with pytest.warns(UserWarning, match="will detect unused parameters automatically"):
        DDP(Branches(), static_graph=True, find_unused_parameters=True)
    late = DDP(Branches())
    late(X, both=True).sum().backward()
    with pytest.raises(RuntimeError, match="should be called before training loop starts"):
        late._set_static_graph()
    assert not late.static_graph


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


def test_removed_hooks_do_not_synchronise() -> None:
    wrapped = DDP(nn.Linear(2, 1))
    wrapped._remove_autograd_hooks()
    wrapped(X).sum().backward()
    assert wrapped.reducer.reduced_bucket_count == 0


# ---- kinds of gradients


def test_dtypes_shared_and_frozen_parameters_mix() -> None:
    class Mix(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(2, 2)
            self.b = nn.Linear(2, 2).double()
            self.c = nn.Linear(2, 2)
            self.c.weight = self.a.weight
            self.b.bias.requires_grad_(False)

        def forward(self, x: Tensor) -> Any:
            return self.c(self.b(self.a(x).double()).float())

    model = Mix()
    alone = copy.deepcopy(model)
    wrapped = DDP(model)
    for _ in range(2):
        for module in (wrapped, alone):
            module.zero_grad()
            module(X).sum().backward()
        assert same_gradients(model, alone)
    assert len(wrapped.reducer.buckets) == 2


def test_sparse_gradients_with_and_without_metadata() -> None:
    embedding = nn.Embedding(6, 2, sparse=True)
    wrapped = DDP(nn.Sequential(embedding))
    rows = torch.tensor([4, 1, 1])
    wrapped(rows).sum().backward()
    assert grad_of(embedding.weight).coalesce().indices().tolist() == [[1, 4]]
    wrapped.zero_grad()
    wrapped._set_sparse_metadata({"0.weight": torch.tensor([1, 2, 4])})
    wrapped(rows).sum().backward()
    grad = grad_of(embedding.weight).coalesce()
    assert grad.indices().tolist() == [[1, 2, 4]]
    assert grad.values().tolist() == [[2, 2], [0, 0], [1, 1]]


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


def test_a_sparse_parameter_must_have_a_sparse_gradient() -> None:
    embedding = nn.Embedding(6, 2, sparse=True)
    wrapped = DDP(nn.Sequential(embedding))
    embedding.sparse = False
    loss = wrapped(torch.tensor([1])).sum()
    with pytest.raises(RuntimeError, match="Expected variable to have sparse gradient"):
        loss.backward()

"""Communication hooks, and what else happens to buckets: optimizers, precision. One rank."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from impl.ddp import GradBucket
from impl.ddp.iteration.comm_hooks import is_power_sgd, values_of_rows
from impl.torch_private import MixedPrecision
from tests.impl.ddp.models import (
    DDP,
    Branches,
    FutureTensor,
    TwoLayers,
    X,
    grad_of,
    same_gradients,
    unchanged,
)

pytestmark = pytest.mark.usefixtures("one_rank")


def future_of(value: Any) -> Any:
    future: Any = torch.futures.Future()
    future.set_result(value)
    return future


def channels_last_conv() -> nn.Conv2d:
    conv = nn.Conv2d(2, 3, 2)
    conv.weight.data = conv.weight.data.contiguous(memory_format=torch.channels_last)
    return conv


# ---- what a hook sees


def test_power_sgd_gets_gradients_that_it_can_view_as_matrices() -> None:
    state = PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=0.1)
    assert is_power_sgd(state)
    assert not is_power_sgd(None)
    wrapped = DDP(channels_last_conv())
    wrapped.register_comm_hook(state, powerSGD_hook)
    for _ in range(4):
        wrapped(torch.randn(1, 2, 4, 4)).square().sum().backward()


def test_a_hook_sees_complex_gradients_as_complex() -> None:
    seen: list[GradBucket] = []

    def hook(state: Any, bucket: GradBucket) -> FutureTensor:
        seen.append(bucket)
        return unchanged(bucket)

    model = nn.Linear(2, 1, dtype=torch.complex64)
    wrapped = DDP(model)
    wrapped.register_comm_hook(None, hook)
    wrapped(X.to(torch.complex64)).abs().sum().backward()
    (bucket,) = seen
    assert (bucket.buffer().dtype, bucket.buffer().numel()) == (torch.float32, 6)
    assert (bucket.index(), bucket.is_last()) == (0, True)
    assert bucket.gradients()[0].equal(grad_of(model.weight))


def test_a_bucket_can_be_made_by_hand() -> None:
    params = [torch.zeros(2, 2), torch.zeros(3)]
    bucket = GradBucket(1, 3, torch.arange(7.0), params)
    assert [grad.tolist() for grad in bucket.gradients()] == [[[0, 1], [2, 3]], [4, 5, 6]]
    assert not bucket.is_last()
    assert all(a is b for a, b in zip(bucket.parameters(), params, strict=True))
    bucket.set_buffer(bucket.buffer().half())
    assert {grad.dtype for grad in bucket.gradients()} == {torch.float16}
    assert "1 of 3" in repr(bucket)


# ---- what a hook returns


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (5, r"must return a torch\.futures\.Future object, but got builtins\.int"),
        (None, r"must return a torch\.futures\.Future object, but got builtins\.NoneType"),
        (future_of(5), "Unable to cast 5 to Tensor"),
        (future_of([torch.zeros(3)]), "Unable to cast .* to Tensor"),
        (future_of(torch.zeros(2)), "bucket holds 3 elements"),
    ],
)
def test_a_hook_that_returns_nonsense(result: Any, message: str) -> None:
    def hook(state: Any, bucket):  # type: ignore[no-untyped-def]  # such hooks are legal
        return result

    wrapped = DDP(nn.Linear(2, 1))
    wrapped.register_comm_hook(None, hook)
    loss = wrapped(X).sum()
    with pytest.raises(RuntimeError, match=message):
        loss.backward()


def test_a_hook_that_raises_is_heard() -> None:
    def hook(state: Any, bucket: GradBucket) -> FutureTensor:
        raise ZeroDivisionError("in the hook")

    wrapped = DDP(nn.Linear(2, 1))
    wrapped.register_comm_hook(None, hook)
    loss = wrapped(X).sum()
    with pytest.raises(ZeroDivisionError, match="in the hook"):
        loss.backward()
    assert wrapped._get_ddp_logging_data()["error"] == "in the hook"


def test_a_built_in_hook_is_named_by_its_type() -> None:
    not_a_hook: Any = 5
    with pytest.raises(TypeError, match="expects a BuiltinCommHookType"):
        DDP(nn.Linear(2, 1)).reducer.register_builtin_comm_hook(not_a_hook)


# torch 2.11 warns in spite of `check_invariants`
@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
def test_known_rows_of_a_sparse_gradient() -> None:
    gradient = torch.sparse_coo_tensor(
        torch.tensor([[1, 4]]),
        torch.tensor([[1.0, 2.0], [3.0, 4.0]]),
        (6, 2),
        is_coalesced=True,
        check_invariants=True,
    )
    rows = torch.tensor([0, 1, 4, 5])
    assert values_of_rows(gradient, rows).tolist() == [[0, 0], [1, 2], [3, 4], [0, 0]]
    with pytest.raises(RuntimeError, match=r"values for rows \[4\]"):
        values_of_rows(gradient, rows[:2])


# ---- optimizers


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("view", [False, True])
def test_optimizers_step_in_backward(view: bool) -> None:
    from torch.distributed.optim import _apply_optimizer_in_backward

    model = TwoLayers()
    alone = copy.deepcopy(model)
    _apply_optimizer_in_backward(torch.optim.SGD, model.first.parameters(), {"lr": 0.1})
    wrapped = DDP(model, gradient_as_bucket_view=view)
    for _ in range(3):
        wrapped.zero_grad()
        wrapped(X).square().sum().backward()
        assert model.first.weight.grad is None
        alone.zero_grad()
        alone(X).square().sum().backward()
        with torch.no_grad():
            alone.first.weight.sub_(0.1 * grad_of(alone.first.weight))
    torch.testing.assert_close(model.first.weight, alone.first.weight)
    name = wrapped._get_ddp_logging_data()["comm_hook"]
    assert name == "_apply_optim_in_backward_hook.<locals>.apply_optim_in_backward_hook"


def test_fused_optimizers_need_a_functional_form() -> None:
    with pytest.raises(ValueError, match="does not have a functional"):
        DDP(nn.Linear(1, 1))._register_fused_optim(torch.optim.LBFGS, 0.5)


# ---- precision


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("reduce_dtype", [None, torch.float16, torch.float32])
def test_mixed_precision_computes_low_and_steps_high(
    view: bool, reduce_dtype: torch.dtype | None
) -> None:
    model = TwoLayers()
    seen: list[torch.dtype] = []
    model.second.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].dtype))
    wrapped = DDP(
        model,
        mixed_precision=MixedPrecision(torch.bfloat16, reduce_dtype),
        gradient_as_bucket_view=view,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(8, 2)
    for set_to_none in (True, False, True):
        for _ in range(2):
            wrapped(x).float().square().sum().backward()
        assert {param.dtype for param in model.parameters()} == {torch.float32}
        assert {grad_of(param).dtype for param in model.parameters()} == {torch.float32}
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
    assert set(seen) == {torch.bfloat16}
    with torch.no_grad():
        wrapped(x)
    assert {param.dtype for param in model.parameters()} == {torch.float32}
    name = wrapped._get_ddp_logging_data()["comm_hook"]
    assert name == "_reducer_allreduce_and_upcast_hook"


def test_mixed_precision_gradients_are_those_of_a_low_precision_model() -> None:
    model = TwoLayers()
    low = copy.deepcopy(model).bfloat16()
    wrapped = DDP(model, mixed_precision=MixedPrecision(torch.bfloat16, torch.bfloat16))
    wrapped(X).sum().backward()
    low(X.bfloat16()).sum().backward()
    assert same_gradients(model, low.float())


@pytest.mark.filterwarnings("ignore:You passed find_unused_parameters=true")
@pytest.mark.filterwarnings("ignore:find_unused_parameters=True was specified")
@pytest.mark.parametrize("static_graph", [False, True])
def test_mixed_precision_with_unused_and_with_low_parameters(static_graph: bool) -> None:
    model = Branches()
    model.first.bfloat16()  # already in the dtype of computation
    low = copy.deepcopy(model).bfloat16()
    wrapped = DDP(
        model,
        mixed_precision=MixedPrecision(torch.bfloat16, torch.bfloat16),
        find_unused_parameters=True,
        static_graph=static_graph,
    )
    for both in [False] * 3 if static_graph else [False, True, False, True]:
        wrapped.zero_grad()
        low.zero_grad()
        wrapped(X, both=both).sum().backward()
        low(X.bfloat16(), both=both).sum().backward()
        assert wrapped.reducer.unused_params == ([] if both else [1])
        for param, want in zip(model.parameters(), low.parameters(), strict=True):
            if want.grad is None:
                assert param.grad is None
            else:
                assert grad_of(param).equal(grad_of(want).to(param.dtype))


def test_mixed_precision_may_be_for_the_wire_alone() -> None:
    model = nn.Linear(2, 1, bias=False)
    wrapped = DDP(model, mixed_precision=MixedPrecision(reduce_dtype=torch.float16))
    wrapped(X * (1 + 2**-20)).sum().backward()
    assert grad_of(model.weight).tolist() == [[1, 2]]


def test_mixed_precision_of_buffers_leaves_integers_alone() -> None:
    norm = nn.BatchNorm1d(2)
    DDP(norm, mixed_precision=MixedPrecision(buffer_dtype=torch.float64))
    assert norm.running_mean is not None
    assert norm.running_mean.dtype is torch.float64
    assert norm.num_batches_tracked is not None
    assert norm.num_batches_tracked.dtype is torch.int64


# ---- delayed reduction


@pytest.mark.parametrize("all_of_them", [False, True])
def test_delayed_reduction(all_of_them: bool) -> None:
    model = TwoLayers()
    named = list(model.named_parameters())
    wrapped = DDP(
        model,
        delay_all_reduce_named_params=named if all_of_them else named[1:],
        param_to_hook_all_reduce=model.first.weight,
    )
    alone = copy.deepcopy(model)
    for _ in range(2):
        for module in (wrapped, alone):
            module.zero_grad()
            module(X).sum().backward()
        assert same_gradients(model, alone)
    with pytest.raises(ValueError, match="need to be set at the same time"):
        DDP(model, param_to_hook_all_reduce=model.first.weight)

"""Parameters in native mixed precision: their two dtypes and the changes between them."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from impl.torch_private import MixedPrecision
from tests.impl.ddp.models import DDP, TwoLayers

HALF = MixedPrecision(torch.bfloat16)
HALF_AND_REDUCED = MixedPrecision(torch.bfloat16, torch.bfloat16)
ONES = torch.ones(1, 4)

pytestmark = pytest.mark.usefixtures("one_rank")


def wrapped() -> Any:
    return DDP(nn.Linear(4, 1, bias=False), mixed_precision=HALF)


def fives(ddp: Any) -> Tensor:
    return torch.full_like(ddp.module.weight, 5.0, dtype=torch.float32)


@pytest.mark.parametrize("grad_enabled", [True, False])
def test_data_that_were_replaced_count(grad_enabled: bool) -> None:
    ddp = wrapped()
    ddp(ONES).sum().backward()
    nn.utils.vector_to_parameters(torch.full((4,), 5.0), ddp.parameters())
    with torch.set_grad_enabled(grad_enabled):
        out = ddp(ONES)
    assert out.item() == 20.0
    if grad_enabled:
        out.sum().backward()
    assert ddp.module.weight.equal(fives(ddp))


def test_what_is_loaded_while_nobody_calls_backward_counts() -> None:
    ddp = wrapped()
    ddp(ONES)
    ddp.load_state_dict({"module.weight": fives(ddp)})
    assert ddp(ONES).item() == 20.0
    ddp(ONES).sum().backward()
    assert ddp.module.weight.equal(fives(ddp))


def test_data_that_are_replaced_between_the_passes_count() -> None:
    ddp = wrapped()
    out = ddp(ONES)
    ddp.module.weight.data = torch.full((1, 4), 5.0, dtype=torch.bfloat16)
    out.sum().backward()
    assert ddp.module.weight.equal(fives(ddp))
    assert ddp.module.weight.dtype is torch.float32


class Raising(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)
        self.raises = True

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x)
        if self.raises:
            raise ArithmeticError("no")
        return out


def test_a_forward_that_raises_leaves_full_precision() -> None:
    ddp = DDP(Raising(), mixed_precision=HALF)
    with pytest.raises(ArithmeticError):
        ddp(ONES)
    assert all(param.dtype is torch.float32 for param in ddp.parameters())


def test_a_backward_pass_that_waits_outlives_a_forward_that_raises() -> None:
    ddp: Any = DDP(Raising(), mixed_precision=HALF)
    ddp.module.raises = False
    out = ddp(ONES)
    ddp.module.raises = True
    with pytest.raises(ArithmeticError):
        ddp(ONES)
    out.sum().backward()
    assert ddp.module.linear.weight.grad is not None
    assert all(param.dtype is torch.float32 for param in ddp.parameters())


def test_a_backward_pass_that_waits_outlives_an_evaluation() -> None:
    ddp = wrapped()
    out = ddp(2 * ONES)
    with torch.no_grad():
        evaluated = ddp(ONES)
    assert evaluated.dtype is torch.bfloat16
    out.sum().backward()
    assert ddp.module.weight.grad.equal(2 * ONES)
    assert ddp.module.weight.dtype is torch.float32


def test_a_module_that_was_saved_can_be_loaded() -> None:
    ddp = wrapped()
    ddp(ONES).sum().backward()
    for saved in (ddp.module, ddp):
        file = io.BytesIO()
        torch.save(saved, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        assert next(loaded.parameters()).equal(ddp.module.weight)
        assert loaded(ONES).dtype is (torch.bfloat16 if saved is ddp else torch.float32)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(self.scale.dtype)
        out: Tensor = self.linear(x).float() * self.scale
        return out


def test_copies_know_what_is_ignored() -> None:
    module = Scaled()
    DDP._set_params_and_buffers_to_ignore_for_model(module, ["scale"])
    ddp = DDP(module, mixed_precision=HALF)
    for each in (ddp, copy.deepcopy(ddp)):
        each(ONES).sum().backward()
        assert each.module.seen == [torch.float32]


def test_torchs_names_for_the_two_precisions() -> None:
    ddp = wrapped()
    for _ in range(2):
        assert ddp.module.weight._mp_param.dtype is torch.bfloat16
        assert ddp.module.weight._fp_param.dtype is torch.float32
        ddp(ONES).sum().backward()


@pytest.mark.parametrize("saved", [False, True])
def test_a_copy_that_is_made_before_gradients_are_averaged_has_full_precision(saved: bool) -> None:
    ddp = wrapped()
    nn.init.constant_(ddp.module.weight, 1 + 2**-20)
    weight = ddp.module.weight.detach().clone()
    with ddp.no_sync():
        ddp(ONES).sum().backward()
    file = io.BytesIO()
    torch.save(ddp, file)
    file.seek(0)
    other = torch.load(file, weights_only=False) if saved else copy.deepcopy(ddp)
    assert other.module.weight.equal(weight)
    for each in (ddp, other):
        each(ONES).sum().backward()
        assert each.module.weight.equal(weight)


class Phases(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.phase = nn.Parameter(torch.tensor([3.0 + 4.0j, 1.0j]))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x) * (self.phase.real * self.phase.imag)
        return out


@pytest.mark.parametrize("view", [False, True])
def test_complex_parameters_keep_their_precision(view: bool) -> None:
    module = Phases()
    alone = copy.deepcopy(module)
    ddp = DDP(module, gradient_as_bucket_view=view, mixed_precision=HALF_AND_REDUCED)
    for _ in range(3):
        ddp.zero_grad()
        ddp(ONES).sum().backward()
    alone(ONES).sum().backward()
    assert module.phase.dtype is torch.complex64
    assert alone.phase.grad is not None
    torch.testing.assert_close(module.phase.grad, alone.phase.grad, rtol=1e-2, atol=1e-2)


def test_delayed_gradients_stay_in_full_precision() -> None:
    module: Any = TwoLayers(4)
    module.second.register_forward_pre_hook(lambda _, given: tuple(x.float() for x in given))
    ddp = DDP(
        module,
        mixed_precision=HALF,
        delay_all_reduce_named_params=[("second.weight", module.second.weight)],
        param_to_hook_all_reduce=module.first.weight,
    )
    ddp(ONES).sum().backward()
    assert module.first.weight._mp_param.dtype is torch.bfloat16
    assert not hasattr(module.second.weight, "_mp_param")
    assert module.second.weight.grad.dtype is torch.float32

"""The oracle of batch norm over all ranks' batches."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from conformance.oracle.batchnorm import Running, evaluated, whole_batch
from conformance.oracle.near import Near

WEIGHT, BIAS = torch.tensor([2.0, -1.0]), torch.tensor([0.5, 3.0])


def random_batches(sizes: list[int], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(n, 2, 3, generator=generator).to(dtype) + n for n in sizes]


def test_an_example_on_paper() -> None:
    """0, 2 and 10 in one channel: mean 4, squared deviations 16 + 4 + 36 = 56."""
    xs = [torch.tensor([[0.0], [2.0]]), torch.tensor([[10.0]])]
    found = whole_batch(xs, xs, eps=56 / 3)  # as large as the variance
    root = (2 * 56 / 3) ** 0.5
    assert found.outputs[0].value.flatten().tolist() == pytest.approx([-4 / root, -2 / root])
    assert found.outputs[1].value.flatten().tolist() == pytest.approx([6 / root])
    assert found.moments is not None
    assert found.moments.mean.tolist() == [4.0]
    assert found.moments.var.tolist() == pytest.approx([28.0])  # unbiased: 56 / 2


def test_splits_do_not_matter() -> None:
    xs = random_batches([3, 0, 4])
    whole = [torch.cat(xs)]
    parts = whole_batch(xs, xs, WEIGHT, BIAS)
    one = whole_batch(whole, whole, WEIGHT, BIAS)
    for name in ("outputs", "input_grads"):
        joined = torch.cat([near.value for near in getattr(parts, name)])
        assert torch.equal(joined, getattr(one, name)[0].value)
    for name in ("weight_grads", "bias_grads"):
        summed = torch.stack([near.value for near in getattr(parts, name)]).sum(0)
        torch.testing.assert_close(summed, getattr(one, name)[0].value)
    assert parts.input_grads[1].value.shape == (0, 2, 3)


def test_gradients_are_slopes() -> None:
    xs = [x.double() for x in random_batches([2, 3])]
    dys = [x.sin() for x in xs]
    found = whole_batch(xs, dys, WEIGHT, BIAS)
    step = 1e-6

    def loss() -> float:
        outputs = whole_batch(xs, dys, WEIGHT, BIAS).outputs
        return sum(float((near.value * dy).sum()) for near, dy in zip(outputs, dys, strict=True))

    xs[1][2, 0, 1] += step
    above = loss()
    xs[1][2, 0, 1] -= 2 * step
    slope = (above - loss()) / (2 * step)
    assert found.input_grads[1].value[2, 0, 1].item() == pytest.approx(slope, rel=1e-6)


def test_an_empty_batch_becomes_nothing() -> None:
    xs = [torch.zeros(0, 2), torch.zeros(0, 2)]
    found = whole_batch(xs, xs, WEIGHT, None)
    assert found.moments is None
    assert [near.value.shape for near in found.outputs] == [(0, 2), (0, 2)]
    assert not found.weight_grads[0].value.any()
    assert found.bias_grads == []


@pytest.mark.parametrize(
    ("dtype", "mean"),  # a mean far from zero, which the type still tells from its neighbours
    [
        (torch.float64, 1e6),
        (torch.float32, 1e3),
        (torch.bfloat16, 10.0),
        (torch.float16, 100.0),
        *((dtype, 0.0) for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)),
    ],
    ids=str,
)
def test_what_torch_computes_is_near_and_another_number_is_not(
    dtype: torch.dtype, mean: float
) -> None:
    x = random_batches([5])[0].add(mean).to(dtype).requires_grad_()
    dy = random_batches([5], dtype)[0].sin()
    # torch has parameters of the input's type, or of float32 for a half type.
    kind = torch.promote_types(dtype, torch.float32)
    weight, bias = WEIGHT.to(kind), BIAS.to(kind)
    found = whole_batch([x.detach()], [dy], weight, bias)
    y = torch.nn.functional.batch_norm(x, None, None, weight, bias, training=True)
    y.backward(dy)
    assert x.grad is not None
    for got, near in ((y, found.outputs[0]), (x.grad, found.input_grads[0])):
        assert not near.off(got).any()
        assert near.off(got + 0.1 * got.abs().max()).any()


def test_running_statistics_by_momentum_and_by_average() -> None:
    xs = [torch.tensor([[0.0], [2.0]]), torch.tensor([[10.0]])]
    moments = whole_batch(xs, xs).moments
    moved = Running.fresh(1).after(moments, 0.5, torch.float32)
    assert (moved.mean.tolist(), moved.var.tolist()) == ([2.0], [pytest.approx(14.5)])
    again = moved.after(None, 0.5, torch.float32)
    assert (again.mean.tolist(), again.batches) == ([2.0], 2)
    first = Running.fresh(1).after(moments, None, torch.float32)
    assert (first.mean.tolist(), first.var.tolist()) == ([4.0], [pytest.approx(28.0)])
    second = first.after(
        whole_batch([torch.ones(2, 1)], [torch.ones(2, 1)]).moments, None, first.mean.dtype
    )
    assert second.mean.tolist() == pytest.approx([2.5])
    assert second.near(torch.float16)[0].dtype is torch.float16


def test_eval_mode_takes_what_it_is_given() -> None:
    x = torch.tensor([[3.0, -1.0]])
    near = evaluated(x, torch.tensor([1.0, 1.0]), torch.tensor([4.0, 0.0]), WEIGHT, BIAS, eps=1.0)
    assert near.value.flatten().tolist() == pytest.approx([2 * 2 / 5**0.5 + 0.5, 2.0 + 3.0])


def test_near_is_relative_to_the_largest() -> None:
    near = Near.relative(torch.tensor([100.0, 0.0]), 1e-3)
    assert near.dtype is torch.float32
    assert near.off(torch.tensor([100.05, -0.05])).tolist() == [False, False]
    assert near.off(torch.tensor([100.2, 0.2])).tolist() == [True, True]
    assert near.off(torch.tensor([float("nan"), 0.0])).tolist() == [True, False]
    assert not Near.relative(torch.zeros(0), 1e-3).off(torch.zeros(0)).any()


def test_infinities_and_nans_are_near_themselves_alone() -> None:
    numbers = torch.tensor([float("inf"), float("nan")])
    near = Near(numbers.double(), torch.zeros(()).double(), torch.float32)
    assert not near.off(numbers).any()
    assert near.off(numbers.flip(0)).all()


def test_an_infinity_lets_no_other_number_be_further_off() -> None:
    wanted = torch.tensor([float("inf"), 2.0])
    assert Near.relative(wanted, 1e-3).off(torch.tensor([1e30, 2.5])).tolist() == [True, True]
    # As an oracle computes it from the numbers themselves.
    near = Near(wanted.double(), wanted.double() * 1e-3, torch.float32)
    assert near.off(torch.tensor([1e30, 2.0])).tolist() == [True, False]

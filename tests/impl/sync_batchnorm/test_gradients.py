"""The backward pass is the derivative of the forward pass, by finite differences."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from impl.sync_batchnorm.normalise import moments_of_all_ranks, normalise
from impl.sync_batchnorm.passes import passes_for


@dataclass(frozen=True)
class FrozenPeers:
    """A group whose other ranks hold fixed batches and whose outputs are not differentiated."""

    batches: list[Tensor]

    def all_gather(self, message: Tensor) -> Tensor:
        others = [passes_for(batch).local_moments(batch).pack() for batch in self.batches]
        return torch.stack([message, *others])

    def all_reduce(self, vector: Tensor) -> Tensor:
        return vector


@pytest.mark.parametrize("rest", [(2,), (2, 3), (2, 2, 2)])
@pytest.mark.parametrize("peers", [[], [3], [1, 4]])
@pytest.mark.parametrize(("has_weight", "has_bias"), [(True, True), (True, False), (False, False)])
def test_gradcheck(
    rest: tuple[int, ...], peers: list[int], has_weight: bool, has_bias: bool
) -> None:
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    exchange = FrozenPeers([randn(size, *rest) + 1 for size in peers])
    x = randn(4, *rest).requires_grad_()
    weight = randn(2).requires_grad_() if has_weight else None
    bias = randn(2).requires_grad_() if has_bias else None

    def layer(x: Tensor, *_: Tensor) -> Tensor:
        return normalise(x, weight, bias, moments_of_all_ranks(x, exchange), 1e-3, exchange)

    # Finite differences change the tensors in place, so it is enough that layer sees them.
    inputs = [tensor for tensor in (x, weight, bias) if tensor is not None]
    assert torch.autograd.gradcheck(layer, inputs)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_bias_may_change_before_backward(dtype: torch.dtype) -> None:
    """torch's layer does not save it either."""
    exchange = FrozenPeers([])
    x = torch.tensor([[1.0, -2.0], [3.0, 0.5]], dtype=torch.float64)
    weight, bias = torch.ones(2, dtype=dtype), torch.ones(2, dtype=dtype, requires_grad=True)
    out = normalise(x, weight, bias, moments_of_all_ranks(x, exchange), 1e-3, exchange)
    with torch.no_grad():
        bias.zero_()
    out.backward(torch.tensor([[1.0, 2.0], [4.0, 8.0]], dtype=out.dtype))
    assert bias.grad is not None
    assert (bias.grad.dtype, bias.grad.tolist()) == (dtype, [5, 10])


def test_a_second_derivative_is_refused_not_wrong() -> None:
    exchange = FrozenPeers([])
    x = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)
    out = normalise(x, None, None, moments_of_all_ranks(x, exchange), 1e-3, exchange)
    (grad,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()

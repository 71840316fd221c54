"""Forward and backward of the layer as an autograd function, with its two collectives.

One collective each way. [Note: moments] says what is sent forward; the package's docstring has the
formulas.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from impl.sync_batchnorm.moments import Moments, empty_moments, merge
from impl.sync_batchnorm.passes import memory_format, passes_for


class Exchange(Protocol):
    """What the layer asks of a group of ranks. Every rank must make the same calls."""

    def all_gather(self, message: Tensor) -> Tensor:
        """Every rank's message, (world_size, len(message)), in rank order."""

    def all_reduce(self, vector: Tensor) -> Tensor:
        """The sum of every rank's vector; it may overwrite vector."""


@dataclass(frozen=True)
class GroupExchange:
    """Exchange over a process group, of any backend."""

    group: dist.ProcessGroup | None  # None: the world
    world_size: int

    def all_gather(self, message: Tensor) -> Tensor:
        # The list form, which all backends have in all versions. The form with one output tensor is
        # all_gather_into_tensor up to 2.12 and warns in 2.13, where it is all_gather_single.
        messages = message.new_empty((self.world_size, message.numel()))
        dist.all_gather(list(messages), message, self.group)
        return messages

    def all_reduce(self, vector: Tensor) -> Tensor:
        dist.all_reduce(vector, dist.ReduceOp.SUM, self.group)
        return vector


def moments_of_all_ranks(x: Tensor, exchange: Exchange) -> Moments:
    """Moments of all ranks' batches as one; the same bits on every rank. x: (N, C, *), dense."""
    own = passes_for(x).local_moments(x.detach()) if x.numel() > 0 else empty_moments(x)
    messages = exchange.all_gather(own.pack())
    return merge(Moments.unpack(messages))


def normalise(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    moments: Moments,
    eps: float,
    exchange: Exchange,
) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias; differentiable once.

    x: (N, C, *), dense, may be empty. weight, bias: (C,). moments: of all ranks. The gradient of x
    accounts for the moments' dependence on every rank's batch.
    """
    # Function.apply is not annotated in torch.
    out: Tensor = _Normalise.apply(x, weight, bias, moments, eps, exchange)  # type: ignore[no-untyped-call]
    return out


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        moments: Moments,
        eps: float,
        exchange: Exchange,
    ) -> Tensor:
        invstd = (moments.variance() + eps).rsqrt()
        # Not the bias, which may change before backward: no gradient depends on its values.
        ctx.save_for_backward(x, weight, moments.mean, invstd, moments.count)
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.exchange = exchange
        if x.numel() == 0:
            return torch.empty_like(x)
        factor, term = _or(weight, 1.0, invstd), _or(bias, 0.0, invstd)
        return passes_for(x).normalise(x, moments.mean, invstd, factor, term)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, invstd, count = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        # The gradient comes in the format that the next layer chose; the passes want that of x.
        dy = grad_output.contiguous(memory_format=memory_format(x))
        passes = passes_for(x)
        sum_dy = sum_product = torch.zeros_like(mean)
        if x.numel() > 0:
            sum_dy, sum_product = passes.gradient_sums(dy, x, mean)

        grad_x = None
        if needs_x:
            sums = ctx.exchange.all_reduce(torch.cat([sum_dy, sum_product]))
            mean_dy, mean_product = (sums / count.clamp(min=1)).chunk(2)
            if x.numel() > 0:
                factor = _or(weight, 1.0, invstd)
                grad_x = passes.input_gradient(dy, x, mean, invstd, factor, mean_dy, mean_product)
            else:
                grad_x = torch.empty_like(x)
        grad_weight = (sum_product * invstd).to(weight.dtype) if needs_weight else None
        grad_bias = sum_dy.to(ctx.bias_dtype) if needs_bias else None
        return grad_x, grad_weight, grad_bias, None, None, None


def _or(vector: Tensor | None, missing: float, like: Tensor) -> Tensor:
    """vector, or what stands for it if a layer has none; in float64."""
    return torch.full_like(like, missing) if vector is None else vector.double()

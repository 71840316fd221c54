"""What SyncBatchNorm must compute: batch norm of all ranks' batches as one batch, in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True)
class Expected:
    outputs: list[Tensor]  # one per rank
    input_grads: list[Tensor]  # one per rank
    weight_grads: list[Tensor]  # one per rank: each rank's own part
    bias_grads: list[Tensor]  # one per rank
    running_mean: Tensor
    running_var: Tensor


def whole_batch(
    batches: Sequence[Tensor],
    output_grads: Sequence[Tensor],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    momentum: float = 0.1,
) -> Expected:
    """Forward and backward in training, from running statistics of 0 and 1."""
    sizes = [len(batch) for batch in batches]
    x = torch.cat([batch.detach().double() for batch in batches]).requires_grad_()
    dy = torch.cat([grad.detach().double() for grad in output_grads])
    channels = x.size(1)
    running_mean = torch.zeros(channels, dtype=torch.float64)
    running_var = torch.ones(channels, dtype=torch.float64)
    y = functional.batch_norm(
        x,
        running_mean,
        running_var,
        None if weight is None else weight.detach().double(),
        None if bias is None else bias.detach().double(),
        training=True,
        momentum=momentum,
    )
    (grad,) = torch.autograd.grad(y, x, dy)
    normalised = functional.batch_norm(x.detach(), None, None, training=True)
    dims = [dim for dim in range(x.dim()) if dim != 1]
    parts = list(zip(dy.split(sizes), normalised.split(sizes), strict=True))
    return Expected(
        outputs=list(y.detach().split(sizes)),
        input_grads=list(grad.split(sizes)),
        weight_grads=[(g * n).sum(dims) for g, n in parts],
        bias_grads=[g.sum(dims) for g, _ in parts],
        running_mean=running_mean,
        running_var=running_var,
    )

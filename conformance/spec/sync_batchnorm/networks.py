"""Networks with batch norm, and their parameter gradients: over all ranks, and in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from conformance import Me
from conformance.oracle.data import seeded_generator


class Transposing(nn.Module):
    """Batch norm over the last dimension, between two linear layers, by way of transposing."""

    def __init__(self, dimensions: int) -> None:
        super().__init__()
        self.before = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4) if dimensions == 1 else nn.BatchNorm2d(4)
        self.after = nn.Linear(4, 3)
        self.dimensions = dimensions

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        if self.dimensions == 2:
            x = x.unsqueeze(-1)
        x = self.norm(x.transpose(1, 2)).transpose(1, 2)
        if self.dimensions == 2:
            x = x.squeeze(-1)
        y: Tensor = self.after(x)
        return y


def deep_network() -> nn.Module:
    """Two convolutions and a linear layer, with a batch norm after each."""
    return nn.Sequential(
        nn.Conv2d(2, 3, 3),
        nn.BatchNorm2d(3),
        nn.ReLU(),
        nn.Conv2d(3, 4, 2),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16, 3),
        nn.BatchNorm1d(3, affine=False),
    )


def seeded(make: Callable[..., nn.Module], args: Sequence[Any]) -> nn.Module:
    """The network in float64 with the same parameters in every process."""
    with seeded_generator(0):
        network = make(*args).double()
        with torch.no_grad():
            for parameter in network.parameters():
                # New batch norms have weight 1 and bias 0, which would hide that they are ignored.
                parameter.add_(torch.rand(parameter.shape, dtype=torch.float64) / 2)
    return network


def loss_of(y: Tensor) -> Tensor:
    """A loss of which every element of the output has another gradient. Adds up over samples."""
    factors = torch.arange(1, y[0].numel() + 1, dtype=y.dtype, device=y.device).sin()
    return (y * factors.view(y.shape[1:])).pow(2).sum() + (y * factors.view(y.shape[1:])).sum()


def summed_gradients(
    me: Me, make: Callable[..., nn.Module], args: Sequence[Any], x: Tensor
) -> dict[str, Tensor]:
    """Each parameter's gradients, added up over the ranks, of a converted network."""
    network = me.sync_batchnorm().convert_sync_batchnorm(seeded(make, args)).to(me.device)
    loss_of(network(x.to(me.device))).backward()
    sums = {name: parameter.grad for name, parameter in network.named_parameters()}
    for grad in sums.values():
        dist.all_reduce(grad)
    return sums


def whole_gradients(
    make: Callable[..., nn.Module], args: Sequence[Any], xs: Sequence[Tensor]
) -> dict[str, Tensor]:
    """Gradients of the network as it is made, on the whole batch."""
    network = seeded(make, args)
    loss_of(network(torch.cat(list(xs)))).backward()
    grads = {}
    for name, parameter in network.named_parameters():
        assert parameter.grad is not None
        grads[name] = parameter.grad
    return grads

"""Small models and helpers that several DDP tests use."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from impl.ddp import DistributedDataParallel, GradBucket

DDP = DistributedDataParallel
FutureTensor = torch.futures.Future[Tensor]
X = torch.tensor([[1.0, 2.0]])


class Branches(nn.Module):
    """Two layers; the second is used on demand."""

    def __init__(self, width: int = 2) -> None:
        super().__init__()
        self.first = nn.Linear(width, width, bias=False)
        self.second = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, both: bool = False) -> Any:
        x = self.first(x)
        return self.second(x) if both else x


class TwoHeads(Branches):
    """The same layers side by side."""

    def forward(self, x: Tensor, both: bool = False) -> Any:
        return {"first": self.first(x), "second": [self.second(x)]}


class TwoLayers(Branches):
    """One after the other."""

    def forward(self, x: Tensor, both: bool = True) -> Any:
        return self.second(torch.tanh(self.first(x)))


def grad_of(tensor: Tensor) -> Tensor:
    """The gradient of `tensor`, which must have one."""
    assert tensor.grad is not None
    return tensor.grad


def same_gradients(a: nn.Module, b: nn.Module) -> bool:
    """Whether all parameters have equal gradients, or none on both sides."""
    return all(
        (p.grad is None and q.grad is None) or grad_of(p).equal(grad_of(q))
        for p, q in zip(a.parameters(), b.parameters(), strict=True)
    )


def unchanged(bucket: GradBucket) -> FutureTensor:
    """What a hook returns that leaves the bucket as it is."""
    future: FutureTensor = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future

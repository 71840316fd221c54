"""Gradients that stay from one pass to the next, averaged over two ranks once and not twice."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from impl.ddp.buckets import is_large
from tests.impl.ddp.models import DDP, Branches, grad_of
from tests.impl.ddp.ranks import Ranks

LARGE = 256  # a weight of this many rows and columns is copied on its own


class Recomputed(nn.Module):
    """One large layer, run twice, each time under a reentrant checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(LARGE, LARGE, bias=False)

    def forward(self, x: Tensor) -> Any:
        for _ in range(2):
            x = checkpoint(self.layer, x, use_reentrant=True)
        return x


def recomputes(rank: int, views: bool) -> list[float]:
    model = Recomputed()
    assert is_large(model.layer.weight)
    wrapped = DDP(model, static_graph=True, gradient_as_bucket_view=views)
    nn.init.eye_(model.layer.weight)
    seen = []
    for _ in range(3):
        wrapped.zero_grad()
        x = torch.full((1, LARGE), 1.0 + rank, requires_grad=True)
        wrapped(x).sum().backward()
        seen.append(grad_of(model.layer.weight)[0, 0].item())
    return seen


def test_a_large_gradient_that_comes_twice_is_divided_once(two_ranks: Ranks) -> None:
    for views in (False, True):
        # Each rank: x from the first run and x from the second; on average 2 * 1.5.
        assert two_ranks.run(recomputes, views) == [[3.0] * 3] * 2

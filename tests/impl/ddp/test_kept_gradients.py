"""Gradients that stay from one pass to the next, averaged over two ranks once and not twice."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.impl.ddp.models import DDP, Branches, TwoLayers, X, grad_of
from tests.impl.ddp.ranks import Ranks

LARGE = 256  # a weight of this many rows and columns is copied on its own


def leaves_a_branch_out(rank: int, large: bool) -> list[float]:
    torch.manual_seed(0)
    width = LARGE if large else 2
    model = Branches(width)
    wrapped = DDP(
        model,
        find_unused_parameters=True,
        skip_all_reduce_unused_params=True,
        gradient_as_bucket_view=True,
        bucket_cap_mb=1e-6,
    )
    x = torch.full((1, width), 1.0 + rank)
    seen = []
    for both in (True, False, False):
        wrapped(x, both=both).sum().backward()
        seen.append(grad_of(model.second.weight).sum().item())
    return seen


def test_gradients_in_skipped_buckets_stay_as_they_are(two_ranks: Ranks) -> None:
    for large in (False, True):
        mine, theirs = two_ranks.run(leaves_a_branch_out, large)
        assert mine == theirs == [mine[0]] * 3


# ---- gradients that an optimizer has used in backward, and others


class Sparse(nn.Module):
    """A sum of two embeddings, the first with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Embedding(3, 1, sparse=True)
        self.second = nn.Embedding(3, 1)

    def forward(self, rows: Tensor) -> Any:
        return self.first(rows) + self.second(rows)


def steps_in_backward(rank: int, sparse: bool, views: bool) -> list[list[float]]:
    from torch.distributed.optim import _apply_optimizer_in_backward

    model: Any = Sparse() if sparse else TwoLayers()
    for param in model.parameters():
        nn.init.ones_(param)
    _apply_optimizer_in_backward(torch.optim.SGD, model.first.parameters(), {"lr": 1.0})
    wrapped = DDP(model, gradient_as_bucket_view=views, bucket_cap_mb=1e-6)
    seen = []
    for _ in range(3):
        before = model.first.weight.detach().clone()
        wrapped.zero_grad()
        wrapped(torch.tensor([0, 1 + rank]) if sparse else X * rank).sum().backward()
        assert model.first.weight.grad is None
        stepped = before - model.first.weight.detach()
        seen.append([*stepped.flatten().tolist(), *grad_of(model.second.weight).flatten().tolist()])
    return seen


def test_a_step_in_backward_uses_the_average_once(two_ranks: Ranks) -> None:
    for views in (False, True):
        half = [1.0, 0.5, 0.5]
        assert two_ranks.run(steps_in_backward, True, views) == [[half + half] * 3] * 2
        first, second = two_ranks.run(steps_in_backward, False, views)
        assert first == second

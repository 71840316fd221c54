"""SyncBatchNorm under DDP: training as on the whole batch, also with empty batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from conformance import Chapter, Me, Ranks, assert_same_on_all_ranks, assert_that, world_sizes
from conformance.oracle.near import Near
from conformance.spec.sync_batchnorm.networks import deep_network, loss_of, seeded
from conformance.spec.sync_batchnorm.training import normal
from conformance.spec.tolerance import assert_near
from conformance.spec.wrappers import in_ddp

chapter = Chapter("sync_batchnorm", needs="feature:sync_batchnorm_on_cpu")


_LEARNING_RATE = 0.01


def train_in_ddp(me: Me, steps: list[Tensor], kwargs: dict[str, Any]) -> dict[str, Tensor]:
    """The state of a converted model after some steps, each with this rank's part of a batch."""
    network = me.sync_batchnorm().convert_sync_batchnorm(seeded(deep_network, ()))
    model = in_ddp(me, network.to(me.device), **kwargs)
    optimizer = torch.optim.SGD(model.parameters(), _LEARNING_RATE)
    for x in steps:
        optimizer.zero_grad()
        # DDP averages over the ranks, and a sum over all samples is wanted.
        (loss_of(model(x.to(me.device))) * me.world_size).backward()
        optimizer.step()
    return dict(model.module.state_dict())


def train_whole(steps: list[list[Tensor]]) -> dict[str, Tensor]:
    """The state of the model as it is made, after steps with the whole batches."""
    network = seeded(deep_network, ())
    optimizer = torch.optim.SGD(network.parameters(), _LEARNING_RATE)
    for xs in steps:
        optimizer.zero_grad()
        loss_of(network(torch.cat(xs))).backward()
        optimizer.step()
    return dict(network.state_dict())


@chapter.must(
    "sync_batchnorm/under-ddp",
    "Under DistributedDataParallel, optimizer steps give, on every rank, the parameters and "
    "statistics that training on the whole batch in one process gives.",
    source="torch 2.13 docs, SyncBatchNorm: 'used with DistributedDataParallel'",
    rests_on=("sync_batchnorm/input-gradient", "sync_batchnorm/parameter-gradients"),
)
@world_sizes(2, 3)
@pytest.mark.parametrize(
    "kwargs", [{}, {"gradient_as_bucket_view": True}, {"static_graph": True}], ids=str
)
def test_training_in_parallel_is_training_on_the_whole_batch(
    ranks: Ranks, kwargs: dict[str, Any]
) -> None:
    sizes = [2, 3, 1][: ranks.world_size]
    steps = [
        [normal((size, 2, 5, 5), 10 * i + r, "float64") for r, size in enumerate(sizes)]
        for i in range(3)
    ]
    got = ranks.run_each(
        train_in_ddp, [([xs[r] for xs in steps], kwargs) for r in range(ranks.world_size)]
    )
    assert_same_on_all_ranks(got, what="state")
    for name, value in train_whole(steps).items():
        near = Near.relative(value, 1e-8)
        assert_near([mine[name] for mine in got], [near] * len(got), name)


def train_with_little(me: Me, sizes: list[int]) -> tuple[list[list[str]], dict[str, Tensor]]:
    """What is not finite after each step; then the model's state."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(2, 2, 3), nn.BatchNorm2d(2), nn.Linear(4, 2))
    network = me.sync_batchnorm().convert_sync_batchnorm(network)
    model = in_ddp(me, network.to(me.device))
    spoilt = []
    for size in sizes:
        x = normal((size, 2, 6, 6), me.rank).to(me.device).requires_grad_(size % 2 == 0)
        y = model(x)
        y.sum().backward()
        grads = {name: parameter.grad for name, parameter in model.named_parameters()}
        numbers = {"output": y, **grads, **dict(model.named_buffers())}
        spoilt.append([k for k, v in numbers.items() if v is not None and not v.isfinite().all()])
    return spoilt, dict(model.module.state_dict())


@chapter.must(
    "sync_batchnorm/empty-under-ddp",
    "Under DistributedDataParallel, one rank or all of them may have an empty batch: no rank "
    "hangs, and no number becomes NaN.",
    source="pytorch#36530 and pytorch#74944",
    rests_on=("sync_batchnorm/under-ddp", "sync_batchnorm/empty-gradients"),
)
@world_sizes(2, 3)
def test_empty_batches_in_ddp(ranks: Ranks) -> None:
    """Rank 0's is empty first, then every rank's, then no rank's."""
    got = ranks.run_each(
        train_with_little, [([0 if r == 0 else 4, 0, 2],) for r in range(ranks.world_size)]
    )
    for rank, (steps, _) in enumerate(got):
        for i, spoilt in enumerate(steps):
            what = f"not finite after step {i + 1}: {', '.join(spoilt)}"
            assert_that(not spoilt, what, rank)
    assert_same_on_all_ranks([state for _, state in got], what="state")

"""Models that differ between two ranks, and how parameters and buffers become the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from impl.ddp import broadcast_coalesced, verify_params_across_processes
from tests.impl.ddp.models import DDP
from tests.impl.ddp.ranks import Ranks

# ---- models that differ


def build(rank: int, *models: nn.Module) -> str:
    try:
        DDP(models[rank])
    except RuntimeError as error:
        return str(error)
    return "no error"


def transposed(linear: nn.Linear) -> nn.Linear:
    linear.weight = nn.Parameter(linear.weight.detach().t())
    return linear


@pytest.mark.parametrize(
    ("models", "what"),
    [
        ([nn.Linear(2, 2), nn.Linear(3, 3)], "sizes"),
        ([nn.Linear(2, 2), nn.Bilinear(1, 2, 2)], "sizes"),
        ([nn.Linear(2, 2), transposed(nn.Linear(2, 2))], "strides"),
        ([nn.Linear(2, 2), nn.Linear(2, 2).double()], "dtype"),
    ],
    ids=["size", "dimensions", "strides", "dtype"],
)
def test_a_differing_parameter_is_an_error_on_both_ranks(
    two_ranks: Ranks, models: list[nn.Module], what: str
) -> None:
    on_rank_0, on_rank_1 = two_ranks.run(build, *models)
    assert on_rank_0.startswith("[0]: params[0] in this process with sizes [2, 2] appears not")
    assert f"appears not to match {what} of rank 1's" in on_rank_0
    assert on_rank_1.startswith("[1]: params[0] in this process with sizes")
    assert f"appears not to match {what} of the same param in process 0." in on_rank_1


def test_differing_buffers_are_an_error_on_both_ranks(two_ranks: Ranks) -> None:
    models = [nn.BatchNorm1d(2), nn.BatchNorm1d(2)]
    DDP._set_params_and_buffers_to_ignore_for_model(models[1], ["running_mean"])
    for message in two_ranks.run(build, *models):
        assert "DDP expects same model across all ranks, but the buffers of rank" in message


def test_buffers_may_differ_in_their_strides(two_ranks: Ranks) -> None:
    models = [nn.Linear(2, 2), nn.Linear(2, 2)]
    table = torch.arange(6.0).view(2, 3)
    models[0].register_buffer("table", table)
    models[1].register_buffer("table", table.t().contiguous().t())
    assert two_ranks.run(build, *models) == ["no error"] * 2


def verify_alone(rank: int) -> str:
    """Rank 1 leaves no digest, as if it ran torch's DDP."""
    params = [torch.zeros(2 + rank, 3 - rank)]
    group = dist.distributed_c10d._get_default_group()
    try:
        if rank == 0:
            verify_params_across_processes(group, params)
        else:
            dist.utils._verify_param_shape_across_processes(group, params)
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_the_messages_of_verification_are_torchs(two_ranks: Ranks) -> None:
    on_rank_0, on_rank_1 = two_ranks.run(verify_alone)
    assert on_rank_0 == "no error"
    assert "appears not to match sizes of the same param in process 0" in on_rank_1


# ---- tensors of one rank for all


def broadcasts(rank: int) -> list[Any]:
    tensors = [
        torch.full((3, 2), float(rank + 1)),
        torch.full((2, 2), rank + 5, dtype=torch.int64).t(),
        torch.full((4,), rank == 1),
        torch.empty(0, 3),
        torch.full((2,), complex(rank, 1), dtype=torch.complex64),
        torch.arange(6.0).view(2, 3).t() * (rank + 1),
    ]
    group = dist.distributed_c10d._get_default_group()
    broadcast_coalesced(group, tensors, buffer_size=20, src=1)
    return tensors


def test_broadcast_coalesced_gives_every_rank_the_sources_values(two_ranks: Ranks) -> None:
    first, second = two_ranks.run(broadcasts)
    for mine, source in zip(first, second, strict=True):
        assert mine.equal(source)
    assert first[0].eq(2).all()

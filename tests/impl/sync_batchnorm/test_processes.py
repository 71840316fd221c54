"""The layer over a real process group: what threads cannot show."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import impl.gloo  # noqa: F401  # registers pygloo
from impl.sync_batchnorm import SyncBatchNorm
from tests.impl.gloo.ranks import on_processes
from tests.impl.sync_batchnorm.oracle import whole_batch

SIZES = [3, 1, 0]


def in_a_group(
    rank: int, world_size: int, path: str, backend: str, body: Callable[[int], Any]
) -> Any:
    """What body(rank) returns, in a default group of that backend."""
    dist.init_process_group(
        backend,
        store=dist.FileStore(path, world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=30),
    )
    value = body(rank)
    dist.destroy_process_group()
    return value


def batches(world_size: int, seed: int, channels: int = 2) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(size, channels, 3, 3, generator=generator, dtype=torch.float64) + rank
        for rank, size in enumerate(SIZES[:world_size])
    ]


def max_error(got: Tensor | None, want: Tensor) -> float:
    """0 for empty tensors."""
    assert got is not None
    assert got.shape == want.shape
    return (got - want).abs().max().item() if want.numel() else 0.0


def three_steps(rank: int) -> dict[str, float]:
    """The largest errors against batch norm over the whole batch."""
    world_size = dist.get_world_size()
    layer = SyncBatchNorm(2, momentum=None, dtype=torch.float64)
    errors: dict[str, float] = {}
    running_means = []
    for step in range(3):
        xs, dys = batches(world_size, step), batches(world_size, 10 + step)
        want = whole_batch(xs, dys, layer.weight, layer.bias, momentum=1.0)
        running_means.append(want.running_mean)
        x = xs[rank].requires_grad_()
        y = layer(x)
        y.backward(dys[rank])
        errors[f"output {step}"] = max_error(y, want.outputs[rank])
        errors[f"input grad {step}"] = max_error(x.grad, want.input_grads[rank])
        errors[f"weight grad {step}"] = max_error(layer.weight.grad, want.weight_grads[rank])
        layer.zero_grad()
    errors["running mean"] = max_error(layer.running_mean, torch.stack(running_means).mean(0))
    return errors


@pytest.mark.parametrize("backend", ["gloo", "pygloo"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_three_steps(world_size: int, backend: str, tmp_path: Path) -> None:
    path = str(tmp_path / "store")
    for errors in on_processes(world_size, in_a_group, path, backend, three_steps):
        assert {name: error for name, error in errors.items() if error > 1e-12} == {}


def one_value(rank: int) -> str:
    with pytest.raises(ValueError, match="more than 1 value") as caught:
        SyncBatchNorm(2)(torch.ones(1 - rank, 2))
    return str(caught.value)


def test_one_value_over_all_ranks(tmp_path: Path) -> None:
    messages = on_processes(2, in_a_group, str(tmp_path / "store"), "gloo", one_value)
    for rank, message in enumerate(messages):
        assert f"got input size torch.Size([{1 - rank}, 2])" in message

"""The layer over a real process group: what threads cannot show."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from impl.sync_batchnorm import SyncBatchNorm
from tests.impl.sync_batchnorm.oracle import whole_batch
from tests.impl.sync_batchnorm.processes import run_processes

SIZES = [3, 1, 0]


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
    for errors in run_processes(world_size, tmp_path / "store", three_steps, backend):
        assert {name: error for name, error in errors.items() if error > 1e-12} == {}


def counted_collectives(rank: int) -> dict[str, list[str]]:
    """The names of the collectives that c10d was asked for, by what the layer did."""
    calls: list[str] = []

    def count(name: str) -> None:
        function = getattr(dist, name)

        def counting(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return function(*args, **kwargs)

        setattr(dist, name, counting)

    for name in ("all_gather", "all_gather_into_tensor", "all_reduce", "broadcast", "barrier"):
        count(name)

    def take(action: Callable[[], Any]) -> list[str]:
        calls.clear()
        action()
        return list(calls)

    layer = SyncBatchNorm(2)
    x = torch.randn(4, 2, requires_grad=True)
    y = layer(x)
    untracked = SyncBatchNorm(2, track_running_stats=False)
    return {
        "forward": take(lambda: layer(x)),
        "backward": take(lambda: y.sum().backward()),
        "eval": take(lambda: layer.eval()(x).sum().backward()),
        "eval without statistics": take(lambda: untracked.eval()(x).sum().backward()),
    }


def test_one_collective_each_way(tmp_path: Path) -> None:
    for calls in run_processes(2, tmp_path / "store", counted_collectives):
        assert calls == {
            "forward": ["all_gather"],
            "backward": ["all_reduce"],
            "eval": [],
            "eval without statistics": [],
        }


def subgroup(rank: int) -> list[float]:
    """Ranks 1 and 2 normalise together; rank 0, outside of their group, by itself."""
    group = dist.new_group([1, 2])
    layer = SyncBatchNorm(1, momentum=1.0, process_group=group)
    layer(torch.tensor([[10.0 * rank], [10.0 * rank + 2]]))
    assert layer.running_mean is not None
    assert layer.running_var is not None
    alone = SyncBatchNorm(1, momentum=1.0, process_group=dist.new_group([0]))
    if rank == 0:
        alone(torch.tensor([[1.0], [3.0]]))
    return [layer.running_mean.item(), layer.running_var.item(), alone.running_mean.item()]  # type: ignore[union-attr]  # tracked


def test_the_group_limits_who_takes_part(tmp_path: Path) -> None:
    results = run_processes(3, tmp_path / "store", subgroup)
    assert results[0] == pytest.approx([1.0, 2.0, 2.0])
    variance = torch.tensor([10.0, 12.0, 20.0, 22.0]).var().item()
    assert results[1] == results[2] == pytest.approx([16.0, variance, 0.0])


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 3, 2), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 2)
    ).double()


def data_parallel(rank: int) -> dict[str, list[float]]:
    """The gradients of a step under torch's DDP."""
    model = DistributedDataParallel(SyncBatchNorm.convert_sync_batchnorm(network()))
    xs = torch.arange(4 * 2 * 9, dtype=torch.float64).sin().view(4, 2, 3, 3)
    model(xs[2 * rank : 2 * rank + 2]).square().mean().backward()
    return {
        name: [] if parameter.grad is None else parameter.grad.flatten().tolist()
        for name, parameter in model.module.named_parameters()
    }


def test_under_ddp_equals_the_whole_batch(tmp_path: Path) -> None:
    model = network()
    xs = torch.arange(4 * 2 * 9, dtype=torch.float64).sin().view(4, 2, 3, 3)
    model(xs).square().mean().backward()
    for grads in run_processes(2, tmp_path / "store", data_parallel):
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            assert grads[name] == pytest.approx(parameter.grad.flatten().tolist(), abs=1e-12)


def one_value(rank: int) -> str:
    with pytest.raises(ValueError, match="more than 1 value") as caught:
        SyncBatchNorm(2)(torch.ones(1 - rank, 2))
    return str(caught.value)


def test_one_value_over_all_ranks(tmp_path: Path) -> None:
    messages = run_processes(2, tmp_path / "store", one_value)
    for rank, message in enumerate(messages):
        assert f"got input size torch.Size([{1 - rank}, 2])" in message

"""What ranks run in the benchmarks of training: the time of steps, and their peak memory."""

from __future__ import annotations

import ctypes
import functools
import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from conformance.bench.collectives import make_group
from conformance.bench.models import MODELS
from conformance.bench.plan import Span
from conformance.harness import devices
from conformance.harness.me import Me
from conformance.target import Target, resolve

FULLY_SHARD = "fully_shard"
BUCKET_VIEWS = "gradients in buckets"
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h
_WARM_UP = 11  # DDP rebuilds its buckets after the first step and times the first ten


@dataclass(frozen=True, slots=True)
class Step:
    """One line of the table.

    strategy: of FSDP, or "fully_shard"; "" for DDP, or BUCKET_VIEWS with gradient_as_bucket_view.
    """

    model: str
    strategy: str = ""

    def __str__(self) -> str:
        return f"{self.model}, {self.strategy}" if self.strategy else self.model


def measure(
    me: Me, targets: Sequence[Target], steps: Sequence[Step], rounds: int, per_round: int
) -> list[list[list[Span]]]:
    """Every step on this rank, targets by turns, then the floor: [step][target][call]."""
    _keep_freed_memory()
    groups = [make_group(me, target) for target in targets]
    measured = []
    for step in steps:
        calls = [_trainer(me, t, g, step) for t, g in zip(targets, groups, strict=True)]
        calls.append(_alone(me, step))
        spans: list[list[Span]] = [[] for _ in calls]
        for call in calls:
            for _ in range(_WARM_UP):
                call()
        for _ in range(rounds):
            for call, seen in zip(calls, spans, strict=True):
                dist.barrier()
                for _ in range(per_round):
                    entered = time.perf_counter()
                    call()
                    seen.append((entered, time.perf_counter()))
        measured.append(spans)
    return measured


def _keep_freed_memory() -> None:
    """Have malloc give nothing back to the system, and have large tensors in its heap.

    Otherwise gradients that are freed and made anew in each step cost page faults or not, by what
    lies behind them: up to a third of a step, and not of each target's.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc's
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
        mallopt(_M_MMAP_THRESHOLD, 32 * 1024**2)  # the most that it takes


def peak_bytes(me: Me, target: Target, step: Step) -> int:
    """How far the memory of this rank rose above what it was before the model was made.

    That of its device, or, on the CPU and where a device counts none, the resident memory, of which
    pages that several ranks have in common count in equal parts, as they lie at the end.
    """
    group = make_group(me, target)
    gc.collect()
    before = _start_peak(me.device)
    train = _trainer(me, target, group, step)
    for _ in range(_WARM_UP):
        train()
    peak = devices.peak_memory(me.device)
    return (_resident("VmHWM") - _counted_by_others() if peak is None else peak) - before


def _start_peak(device: torch.device) -> int:
    """Forget the peak so far; the memory that is in use now."""
    if devices.start_peak(device):
        return devices.memory_allocated(device) or 0
    Path("/proc/self/clear_refs").write_text("5")
    return _resident("VmRSS") - _counted_by_others()


def _alone(me: Me, step: Step) -> Callable[[], None]:
    """A step as if the other ranks were not there: the floor of what any target can reach.

    Where parameters are divided, the optimizer has this rank's part of them.
    """
    model = MODELS[step.model]
    torch.manual_seed(0)
    module = model.make().to(me.device)
    x = torch.randn(model.input_shape, generator=me.generator).to(me.device)
    is_whole = step.strategy in ("", BUCKET_VIEWS, "NO_SHARD")
    parts = 1 if is_whole else me.world_size
    shards = [nn.Parameter(_part_of(p.detach(), parts)) for p in module.parameters()]
    optimizer = torch.optim.SGD(shards, lr=1e-4)

    def train() -> None:
        module(x).square().mean().backward()
        for shard, parameter in zip(shards, module.parameters(), strict=True):
            assert parameter.grad is not None
            shard.grad, parameter.grad = _part_of(parameter.grad, parts), None
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        devices.synchronize(x.device.type)

    return train


def _part_of(tensor: torch.Tensor, parts: int) -> torch.Tensor:
    """The first of so many equal parts of its elements; the tensor itself if that is all."""
    return tensor if parts == 1 else tensor.reshape(-1)[: tensor.numel() // parts]


def _trainer(me: Me, target: Target, group: Any, step: Step) -> Callable[[], None]:
    model = MODELS[step.model]
    torch.manual_seed(0)
    module = model.make().to(me.device)
    x = torch.randn(model.input_shape, generator=me.generator).to(me.device)
    if step.strategy == FULLY_SHARD:
        mesh = DeviceMesh.from_group(group, me.device.type)
        shard = resolve(target.fully_shard)
        for part in module.modules():
            if isinstance(part, model.layer) and part is not module:
                shard(part, mesh=mesh)
        wrapped = shard(module, mesh=mesh)
    elif step.strategy not in ("", BUCKET_VIEWS):
        wrapped = resolve(target.fsdp)(
            module,
            process_group=group,
            sharding_strategy=ShardingStrategy[step.strategy],
            auto_wrap_policy=ModuleWrapPolicy({model.layer}),
            device_id=me.device,
        )
    else:
        views = step.strategy == BUCKET_VIEWS
        wrapped = resolve(target.ddp)(module, process_group=group, gradient_as_bucket_view=views)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=1e-4)
    return functools.partial(_step, wrapped, optimizer, x)


def _step(model: Any, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    optimizer.zero_grad(set_to_none=True)
    model(x).square().mean().backward()
    optimizer.step()
    devices.synchronize(x.device.type)


def _resident(what: str, file: str = "status") -> int:
    for line in Path("/proc/self", file).read_text().splitlines():
        if line.startswith(what + ":"):
            return int(line.split()[1]) * 1024
    raise LookupError(what)


def _counted_by_others() -> int:
    """What other processes' parts of the shared memory come to that is resident here."""
    return _resident("RssShmem") - _resident("Pss_Shmem", "smaps_rollup")

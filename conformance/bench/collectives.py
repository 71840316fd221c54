"""The rank's side of the benchmark of collectives: each operation through `torch.distributed`."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from conformance.bench.plan import Point, iterations
from conformance.harness.me import Me
from conformance.target import Target, resolve

_WARM_UP = 2


def measure(
    me: Me, targets: Sequence[Target], plan: Sequence[Point], rounds: int
) -> list[list[list[float]]]:
    """Seconds of every call on this rank: [point][target][call].

    Targets take turns within each point, round by round, on the same tensors' sizes, so that a
    machine whose speed drifts is the same for all.
    """
    groups = [make_group(me, target) for target in targets]
    return [_point(me, groups, point, rounds) for point in plan]


def make_group(me: Me, target: Target) -> Any:
    """A group of all ranks on the target's backend."""
    for module in target.imports:
        importlib.import_module(module)
    options = resolve(target.options)() if target.options else None
    return dist.new_group(
        backend=target.backend, pg_options=options, timeout=timedelta(seconds=me.group_timeout_s)
    )


def _point(me: Me, groups: Sequence[Any], point: Point, rounds: int) -> list[list[float]]:
    calls = [_call(me, group, point) for group in groups]
    counts = []
    for call in calls:
        call()
        started = time.perf_counter()
        for _ in range(_WARM_UP):
            call()
        one_s = torch.tensor((time.perf_counter() - started) / _WARM_UP)
        dist.all_reduce(one_s, dist.ReduceOp.MAX)
        counts.append(iterations(one_s.item()))
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for call, count, seen in zip(calls, counts, times, strict=True):
            dist.barrier()
            for _ in range(count):
                started = time.perf_counter()
                call()
                seen.append(time.perf_counter() - started)
    return times


def _call(me: Me, group: Any, point: Point) -> Callable[[], Any]:
    numel = point.numel
    whole = torch.ones(numel, device=me.device)
    part = torch.ones(max(1, numel // me.world_size), device=me.device)
    other = torch.empty_like(whole)
    synchronize = torch.cuda.synchronize if me.device.type == "cuda" else None

    def send_recv() -> None:
        # Half a round trip between the first two ranks; the others have nothing to do.
        if me.rank == 0:
            dist.send(whole, group=group, group_dst=1)
            dist.recv(whole, group=group, group_src=1)
        elif me.rank == 1:
            dist.recv(whole, group=group, group_src=0)
            dist.send(whole, group=group, group_dst=0)

    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
        "broadcast": lambda: dist.broadcast(whole, 0, group=group),
        "reduce": lambda: dist.reduce(whole, 0, group=group),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(whole, part, group=group),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(part, whole, group=group),
        "all_to_all_single": lambda: dist.all_to_all_single(other, whole, group=group),
        "barrier": lambda: dist.barrier(group=group),
        "send_recv": send_recv,
    }
    call = calls[point.operation]
    if synchronize is None:
        return call

    def synchronized() -> None:
        call()
        synchronize()

    return synchronized

"""What ranks run in the benchmark of collectives: making groups, and timing each operation."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from conformance.bench.plan import Point, Span, iterations
from conformance.harness import devices
from conformance.harness.me import Me
from conformance.harness.recorder import unrecorded
from conformance.target import Target, resolve

_WARM_UP = 3


def measure(
    me: Me, targets: Sequence[Target], plan: Sequence[Point], rounds: int
) -> list[list[list[Span]]]:
    """Every call on this rank: [point][target][call].

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


def _point(me: Me, groups: Sequence[Any], point: Point, rounds: int) -> list[list[Span]]:
    calls = [_call(me, group, point) for group in groups]
    counts = []
    for call in calls:
        call()
        one_s = torch.tensor(min(_seconds(call) for _ in range(_WARM_UP)))
        dist.all_reduce(one_s, dist.ReduceOp.MAX)
        counts.append(iterations(one_s.item()))
    spans: list[list[Span]] = [[] for _ in calls]
    for _ in range(rounds):
        for call, count, seen in zip(calls, counts, spans, strict=True):
            dist.barrier()
            call()  # wakes up what was asleep
            for _ in range(count):
                entered = time.perf_counter()
                call()
                seen.append((entered, time.perf_counter()))
    return spans


def _seconds(call: Callable[[], Any]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def _call(me: Me, group: Any, point: Point) -> Callable[[], Any]:
    numel = point.numel
    whole = torch.ones(numel, device=me.device)
    part = torch.ones(max(1, numel // me.world_size), device=me.device)
    other = torch.empty_like(whole)

    send, recv = unrecorded(dist.send), unrecorded(dist.recv)

    def send_recv() -> None:
        # Half a round trip between the first two ranks; the others have nothing to do.
        if me.rank == 0:
            send(whole, group=group, group_dst=1)
            recv(whole, group=group, group_src=1)
        elif me.rank == 1:
            recv(whole, group=group, group_src=0)
            send(whole, group=group, group_dst=0)

    arguments: dict[str, tuple[Any, ...]] = {
        "all_reduce": (whole,),
        "broadcast": (whole, 0),
        "reduce": (whole, 0),
        "all_gather_into_tensor": (whole, part),
        "reduce_scatter_tensor": (part, whole),
        "all_to_all_single": (other, whole),
        "barrier": (),
    }
    if point.operation == "send_recv":
        call: Callable[[], Any] = send_recv
    else:
        operation = unrecorded(getattr(dist, point.operation))
        call = partial(operation, *arguments[point.operation], group=group)
    if me.device.type == devices.HOST:
        return call

    def synchronized() -> None:
        call()
        devices.synchronize(me.device.type)

    return synchronized

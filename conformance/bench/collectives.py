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
from conformance.torch_private import allocated

_WARM_UP = 3

Allocate = Callable[[int], torch.Tensor]  # (numel,) float32, of ones


def measure(
    me: Me, targets: Sequence[Target], plan: Sequence[Point], rounds: int, registered: bool = False
) -> list[list[list[Span]]]:
    """Every call on this rank: [point][target][call].

    registered: after all targets, the first one comes once more, with tensors that it allocates.
    Targets take turns within each point, round by round, on the same tensors' sizes, so that a
    machine whose speed drifts is the same for all. Before each round tensors are written anew.
    """
    groups = [make_group(me, target) for target in targets]
    contestants: list[tuple[Any, Allocate]] = [(group, _ordinary(me)) for group in groups]
    if registered:
        contestants.append((groups[0], _registered(me, groups[0])))
    return [_point(me, contestants, point, rounds) for point in plan]


def _ordinary(me: Me) -> Allocate:
    return lambda numel: torch.ones(numel, device=me.device)


def _registered(me: Me, group: Any) -> Allocate:
    return lambda numel: allocated(group, numel, torch.float32, me.device).fill_(1.0)


def make_group(me: Me, target: Target) -> Any:
    """A group of all ranks on the target's backend."""
    for module in target.imports:
        importlib.import_module(module)
    options = resolve(target.options)() if target.options else None
    return dist.new_group(
        backend=target.backend, pg_options=options, timeout=timedelta(seconds=me.group_timeout_s)
    )


def _point(
    me: Me, contestants: Sequence[tuple[Any, Allocate]], point: Point, rounds: int
) -> list[list[Span]]:
    made = [_call(me, group, point, allocate) for group, allocate in contestants]
    calls = [call for call, _ in made]
    counts = []
    for call in calls:
        call()
        one_s = torch.tensor(min(_seconds(call) for _ in range(_WARM_UP)))
        dist.all_reduce(one_s, dist.ReduceOp.MAX)
        counts.append(iterations(one_s.item()))
    spans: list[list[Span]] = [[] for _ in calls]
    for _ in range(rounds):
        for (call, tensors), count, seen in zip(made, counts, spans, strict=True):
            for tensor in tensors:
                tensor.fill_(1.0)
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


def _call(
    me: Me, group: Any, point: Point, allocate: Allocate
) -> tuple[Callable[[], Any], list[torch.Tensor]]:
    """The call, and the tensors that it uses."""
    numel = point.numel
    whole = allocate(numel)
    part = allocate(max(1, numel // me.world_size))
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
        return call, [whole, part]

    def synchronized() -> None:
        call()
        devices.synchronize(me.device.type)

    return synchronized, [whole, part]

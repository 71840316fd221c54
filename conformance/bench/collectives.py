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

from conformance.bench import floor
from conformance.bench.plan import Point, Span, iterations
from conformance.harness import devices
from conformance.harness.me import Me
from conformance.harness.recorder import unrecorded
from conformance.target import Target, resolve
from conformance.torch_private import allocated

_WARM_UP = 3

Allocate = Callable[[int], torch.Tensor]  # (numel,) float32, of ones
Prepared = tuple[Callable[[], Any], list[torch.Tensor]]  # a call, and the tensors that it uses
TimeCalls = Callable[[Callable[[], Any], int], list[Span]]  # (a call, how often)

_NAMES = {
    "all_gather_into_tensor": "all_gather_single",
    "reduce_scatter_tensor": "reduce_scatter_single",
}  # the names since torch 2.13, which warns at each call by the old ones


def measure(
    me: Me,
    targets: Sequence[Target],
    plan: Sequence[Point],
    rounds: int,
    registered: bool = False,
    with_floor: bool = False,
) -> list[list[list[Span]]]:
    """Every call on this rank: [point][target][call].

    registered: after all targets, the first one comes once more, with tensors that it allocates.
    with_floor: last of all, the floor; it has one span a round, the mean of its calls.
    Targets take turns within each point, round by round, on the same tensors' sizes, so that a
    machine whose speed drifts is the same for all. Before each round tensors are written anew.
    """
    groups = [make_group(me, target) for target in targets]
    contestants: list[tuple[Callable[[Point], Prepared], TimeCalls]] = [
        (partial(_prepare, me, group, allocate=_ordinary(me)), _each_call) for group in groups
    ]
    if registered:
        allocate = _registered(me, groups[0])
        contestants.append((partial(_prepare, me, groups[0], allocate=allocate), _each_call))
    if with_floor:
        inputs = floor.map_inputs(me, max(point.numel for point in plan))
        groups.append(floor.make_group())
        contestants.append((partial(_floor, me, groups[-1], inputs), _mean_call))
    measured = [_point(point, contestants, rounds) for point in plan]
    for group in groups:
        dist.destroy_process_group(group)
    return measured


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
    point: Point,
    contestants: Sequence[tuple[Callable[[Point], Prepared], TimeCalls]],
    rounds: int,
) -> list[list[Span]]:
    made = [prepare(point) for prepare, _ in contestants]
    counts = []
    for call, _ in made:
        call()
        one_s = torch.tensor(min(_seconds(call) for _ in range(_WARM_UP)))
        dist.all_reduce(one_s, dist.ReduceOp.MAX)
        counts.append(iterations(one_s.item()))
    spans: list[list[Span]] = [[] for _ in made]
    for _ in range(rounds):
        for (call, tensors), count, (_, time_calls), seen in zip(
            made, counts, contestants, spans, strict=True
        ):
            for tensor in tensors:
                tensor.fill_(1.0)
            dist.barrier()
            call()  # wakes up what was asleep
            seen += time_calls(call, count)
    return spans


def _each_call(call: Callable[[], Any], count: int) -> list[Span]:
    spans = []
    for _ in range(count):
        entered = time.perf_counter()
        call()
        spans.append((entered, time.perf_counter()))
    return spans


def _mean_call(call: Callable[[], Any], count: int) -> list[Span]:
    """Of calls in which ranks do not wait for each other, until all ranks are through."""
    entered = time.perf_counter()
    for _ in range(count):
        call()
    dist.barrier()
    return [(entered, entered + (time.perf_counter() - entered) / count)]


def _seconds(call: Callable[[], Any]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def _prepare(me: Me, group: Any, point: Point, *, allocate: Allocate) -> Prepared:
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
        call = partial(_operation(point), *arguments[point.operation], group=group)
    if me.device.type == devices.HOST:
        return call, [whole, part]

    def synchronized() -> None:
        call()
        devices.synchronize(me.device.type)

    return synchronized, [whole, part]


def _operation(point: Point) -> Callable[..., Any]:
    newer = _NAMES.get(point.operation, point.operation)
    return unrecorded(getattr(dist, newer, None) or getattr(dist, point.operation))


def _floor(me: Me, group: Any, inputs: Sequence[torch.Tensor], point: Point) -> Prepared:
    call, _ = _prepare(me, group, point, allocate=torch.ones)
    return floor.prepare(point, me.rank, inputs, call)

"""Profiler ranges of collectives, sends and receives: names, input shapes and duration."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.profiler import record_function

from conformance import Chapter, Me, Ranks, assert_each_rank, covers, not_probed, world_sizes
from conformance.spec.collectives.store_sync import tick, wait_for_ticks

chapter = Chapter(
    "collectives", source="torch, distributed_test.py, call_dist_op and _test_send_recv"
)


THE_REST_IS_CALLED = "the rest is called"


def profiled(*functions: Any) -> list[Any]:
    """The events of a profiler while the functions are called, by the time when they began."""
    with torch.autograd.profiler.profile(record_shapes=True) as profile:
        for function in functions:
            function()
    return sorted(profile.function_events, key=lambda event: event.time_range.start)


def profile_operations(me: Me) -> list[tuple[str, list[list[int]]]]:
    """Name and shapes of the backend's ranges, in order."""
    peer = 1 - me.rank

    def numbers(*shape: int) -> torch.Tensor:
        return torch.ones(shape, device=me.device)

    def exchange() -> None:
        sent = dist.isend(numbers(5, 2), peer)
        received = dist.irecv(numbers(5, 2), peer)
        for work in (sent, received):
            assert work is not None
            work.wait()

    events = profiled(
        lambda: dist.all_reduce(numbers(3)),
        lambda: dist.broadcast(numbers(2, 4), 0),
        lambda: dist.all_gather([numbers(6), numbers(6)], numbers(6)),
        exchange,
    )
    prefix = f"{dist.get_backend()}:"
    return [
        (event.name.removeprefix(prefix), [shape for shape in event.input_shapes if shape])
        for event in events
        if event.name.startswith(prefix)
    ]


@not_probed()
@chapter.should(
    "work/profiler-ranges",
    "A profiler records each collective, send and receive as a range that is named after the "
    "backend, a colon and the operation, has the shapes of the inputs, and lasts until the "
    "operation is complete.",
    needs="feature:profiler_ranges",
    rests_on="all_reduce/async",
)
@world_sizes(2)
def test_ranges_are_named_after_backend_and_operation(ranks: Ranks) -> None:
    want = [
        ("all_reduce", [[3]]),
        ("broadcast", [[2, 4]]),
        ("all_gather", [[6]]),
        ("send", [[5, 2]]),
        ("recv", [[5, 2]]),
    ]
    assert_each_rank(ranks.run(profile_operations), want=[want] * ranks.world_size)


def profile_an_operation_that_lasts(me: Me) -> bool:
    """Whether the range of rank 0 ends after it has let rank 1 come."""
    x = torch.ones(3, device=me.device)
    if me.rank > 0:
        wait_for_ticks(me.store, "come")
        dist.all_reduce(x)
        return True
    works: list[Any] = []

    def go_on() -> None:
        with record_function(THE_REST_IS_CALLED):
            tick(me.store, "come", of=1)
        works[0].wait()

    events = profiled(lambda: works.append(dist.all_reduce(x, async_op=True)), go_on)
    spans = {event.name: event.time_range for event in events}
    name = f"{dist.get_backend()}:all_reduce"
    return name in spans and bool(spans[name].end > spans[THE_REST_IS_CALLED].start)


@not_probed()
@covers("work/profiler-ranges")
@world_sizes(2)
def test_a_range_lasts_until_the_operation_is_complete(ranks: Ranks) -> None:
    assert_each_rank(ranks.run(profile_an_operation_that_lasts), want=[True, True])

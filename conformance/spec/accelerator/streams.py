"""Stream order of collectives: kernels before and after, reused or dropped inputs, futures."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from conformance import Chapter, Me, Ranks, assert_that, covers, gpu, needs, world_sizes
from conformance.oracle.collectives import Call, before
from conformance.oracle.data import blank, name_of
from conformance.spec.accelerator.stream_work import Streams, streams_of
from conformance.spec.collectives.perform import Seen, assert_taken, issue

SEMANTICS = "torch 2.13 docs, CUDA semantics: 'CUDA streams'"
NOTES = "torch 2.13 docs, distributed: 'Synchronous and asynchronous collective operations'"

chapter = Chapter("accelerator")


pytestmark = gpu()

OPS = [
    pytest.param(op, marks=needs(f"op:{op}"))
    for op in (
        *("all_reduce", "broadcast", "all_gather_into_tensor", "reduce_scatter_tensor"),
        *("all_gather", "all_to_all_single"),
    )
]
SHAPE = (50, 6)


class Late:
    """A call whose tensors are filled by kernels that run late."""

    def __init__(self, me: Me, call: Call, streams: Streams, *, late: bool = True) -> None:
        self.call = call
        self.streams = streams
        values = before(call, me.rank, me.world_size)
        self.given = [streams.put(_blank_like(x)) for x in values.given]
        self.taken = [streams.put(_blank_like(x)) for x in values.taken]
        filled = [streams.put(x) for x in (*values.given, *values.taken)]
        if late:
            streams.delay()
        for tensor, value in zip((*self.given, *self.taken), filled, strict=True):
            tensor.copy_(value)

    def issue(self, **how: Any) -> Any:
        return issue(self.call, self.given, self.taken, **how)

    def results(self) -> list[Tensor]:
        """Copies on the device, by kernels of the current stream."""
        return [x.clone() for x in self.taken]

    def seen(self, results: list[Tensor]) -> Seen:
        return Seen((), tuple(self.streams.get(x) for x in results))


def _blank_like(x: Tensor) -> Tensor:
    return blank(x.shape, name_of(x.dtype))


def call_after_late_kernels(me: Me, call: Call, async_op: bool) -> Seen:
    late = Late(me, call, streams_of(me))
    work = late.issue(async_op=async_op)
    if async_op:
        work.wait()
    return late.seen(late.results())


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    "async_op",
    [
        pytest.param(
            False,
            marks=(
                chapter.must(
                    "cuda/reads-after-the-stream",
                    "A collective reads its tensors after all kernels that were put on the current "
                    "stream before the call.",
                    source=SEMANTICS,
                    rests_on="cuda/values",
                ),
                chapter.must(
                    "cuda/after-the-call",
                    "Kernels that are put on the current stream after a synchronous call see its "
                    "results.",
                    source=f"{NOTES}: 'function calls utilizing the output on the same CUDA "
                    "stream will behave as expected'",
                    rests_on="cuda/reads-after-the-stream",
                ),
            ),
        ),
        pytest.param(True, marks=covers("cuda/reads-after-the-stream", "cuda/after-the-wait")),
    ],
    ids=["sync", "async"],
)
@world_sizes(1, 2, 3)
def test_kernels_before_the_call_come_before_it(ranks: Ranks, op: str, async_op: bool) -> None:
    call = Call(op, SHAPE)
    assert_taken(call, ranks.run(call_after_late_kernels, call, async_op))


def call_while_outputs_are_read(me: Me, call: Call) -> tuple[list[Tensor], Seen]:
    """What a late kernel has read of the outputs; then the results."""
    streams = streams_of(me)
    late = Late(me, call, streams, late=False)
    streams.delay()
    held = [x.clone() for x in late.taken]
    late.issue()
    return [streams.get(x) for x in held], late.seen(late.results())


@chapter.must(
    "cuda/writes-after-the-stream",
    "A collective writes to its outputs after all kernels that were put on the current stream "
    "before the call, which may still read what the outputs held.",
    source=SEMANTICS,
    rests_on="cuda/values",
)
@pytest.mark.parametrize("op", OPS)
@world_sizes(1, 2, 3)
def test_kernels_that_read_the_outputs_come_before_the_call(ranks: Ranks, op: str) -> None:
    call = Call(op, SHAPE)
    got = ranks.run(call_while_outputs_are_read, call)
    assert_taken(call, [seen for _, seen in got])
    for rank, (held, _) in enumerate(got):
        want = before(call, rank, ranks.world_size).taken
        for mine, expected in zip(held, want, strict=True):
            assert_that(mine.equal(expected), "a kernel before the call saw its result", rank)


def wait_on_other_stream(me: Me, call: Call) -> Seen:
    """Issued on one stream, waited for on a second one, and read there."""
    streams = streams_of(me)
    first, second = streams.new(), streams.new()
    with streams.use(first):
        late = Late(me, call, streams)
        work = late.issue(async_op=True)
    with streams.use(second):
        work.wait()
        results = late.results()
        seen = late.seen(results)
        for tensor in (*late.given, *late.taken):
            streams.uses(tensor, second)
    streams.follow(second)
    return seen


@chapter.must(
    "cuda/after-the-wait",
    "Kernels that are put on a stream after wait was called with this stream as the current one "
    "see the results, whichever stream the call was issued on.",
    source=f"{NOTES}: Work.wait",
    rests_on="cuda/reads-after-the-stream",
)
@needs("device:streams")
@pytest.mark.parametrize("op", OPS)
@world_sizes(1, 2, 3)
def test_a_consumer_on_another_stream_waits_there(ranks: Ranks, op: str) -> None:
    call = Call(op, SHAPE)
    assert_taken(call, ranks.run(wait_on_other_stream, call))


def overwrite_after_call(me: Me, call: Call) -> Seen:
    late = Late(me, call, streams_of(me))
    late.issue()
    results = late.results()
    for tensor in (*late.given, *late.taken):
        tensor.fill_(77)
    return late.seen(results)


@chapter.must(
    "cuda/reuse-after-the-call",
    "The inputs of a synchronous call may be overwritten on the current stream right after it, "
    "and this shows in no rank's result.",
    source=NOTES,
    rests_on="cuda/after-the-call",
)
@pytest.mark.parametrize("op", OPS)
@world_sizes(1, 2, 3)
def test_inputs_are_reused_right_after_the_call(ranks: Ranks, op: str) -> None:
    call = Call(op, SHAPE)
    assert_taken(call, ranks.run(overwrite_after_call, call))


def drop_inputs(me: Me, call: Call) -> Seen:
    """The inputs are gone before the wait, and others may have got their memory."""
    streams = streams_of(me)
    late = Late(me, call, streams)
    work = late.issue(async_op=True)
    shapes = [x.shape for x in late.given]
    late.given.clear()
    others = [streams.put(late.taken[0].new_empty(0).new_full(s, 77)) for s in shapes]
    work.wait()
    results = late.results()
    del others
    return late.seen(results)


@chapter.must(
    "cuda/dropped-tensors",
    "Tensors may be dropped after an asynchronous call; their memory is not given out again "
    "before the operation has used it.",
    source="torch 2.13 docs, Tensor.record_stream",
    rests_on="cuda/after-the-wait",
)
@pytest.mark.parametrize("op", OPS[2:])
@world_sizes(1, 2, 3)
def test_inputs_are_dropped_after_the_call(ranks: Ranks, op: str) -> None:
    call = Call(op, SHAPE)
    assert_taken(call, ranks.run(drop_inputs, call))


def read_in_callback(me: Me, call: Call) -> tuple[Seen, Seen]:
    """Copies made by a callback; and copies made after waiting for the future itself."""
    streams = streams_of(me)
    late = Late(me, call, streams)
    future = late.issue(async_op=True).get_future()
    copies = future.then(lambda _: late.results()).wait()
    future.wait()
    results = late.results()
    for copy in copies:
        streams.uses(copy, streams.current())
    return late.seen(copies), late.seen(results)


@chapter.must(
    "cuda/futures",
    "Kernels of a callback of the operation's future, and those that come after the future's "
    "wait, see the results.",
    source="torch 2.13 docs, torch.futures.Future: devices",
    rests_on="cuda/after-the-wait",
)
@pytest.mark.parametrize("op", OPS)
@world_sizes(1, 2, 3)
def test_callbacks_and_futures_see_the_results(ranks: Ranks, op: str) -> None:
    call = Call(op, SHAPE)
    got = ranks.run(read_in_callback, call)
    assert_taken(call, [in_callback for in_callback, _ in got])
    assert_taken(call, [after_wait for _, after_wait in got])


def several_in_flight(me: Me, calls: list[Call]) -> list[Seen]:
    """Each issued on a stream of its own; waited for last one first, on the current stream."""
    streams = streams_of(me)
    issued = []
    for call in calls:
        stream = streams.new()
        with streams.use(stream):
            late = Late(me, call, streams)
            issued.append((late, late.issue(async_op=True)))
    seen: list[Seen] = []
    for late, work in reversed(issued):
        work.wait()
        for tensor in (*late.given, *late.taken):
            streams.uses(tensor, streams.current())
        seen.insert(0, late.seen(late.results()))
    return seen


@chapter.must(
    "cuda/several-in-flight",
    "Several asynchronous operations may be in progress, issued on different streams, and be "
    "waited for in any order.",
    source=NOTES,
    needs="device:streams",
    rests_on="cuda/after-the-wait",
)
@world_sizes(1, 2, 3)
def test_several_operations_are_under_way(ranks: Ranks) -> None:
    ops = ("all_reduce", "all_gather_into_tensor", "broadcast", "all_reduce")
    calls = [Call(op, SHAPE, salt=salt) for salt, op in enumerate(ops)]
    got = ranks.run(several_in_flight, calls)
    for index, call in enumerate(calls):
        assert_taken(call, [mine[index] for mine in got])

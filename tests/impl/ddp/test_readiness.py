"""Which gradients are missing, and which buckets may be launched."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from impl.ddp.iteration.readiness import LaunchOrder, Readiness, ReadyTwiceError


@st.composite
def bucketings(draw: st.DrawFn) -> list[list[int]]:
    """Some partition of 0, 1, ... into non-empty buckets."""
    count = draw(st.integers(1, 12))
    order = draw(st.permutations(range(count)))
    cuts = draw(st.sets(st.integers(1, count - 1))) if count > 1 else set()
    edges = [0, *sorted(cuts), count]
    return [order[a:b] for a, b in itertools.pairwise(edges)]


def test_a_bucket_is_complete_with_its_last_gradient() -> None:
    readiness = Readiness([[2, 0], [1]])
    assert readiness.mark([0]) == []
    assert readiness.mark([1]) == [1]
    assert readiness.mark([2]) == [0]
    assert readiness.missing() == []


def test_a_gradient_is_ready_once() -> None:
    readiness = Readiness([[0, 1]])
    readiness.mark([1])
    with pytest.raises(ReadyTwiceError) as caught:
        readiness.mark([1])
    assert caught.value.args == (1,)


def test_begin_forgets() -> None:
    readiness = Readiness([[0, 1]])
    readiness.mark([0, 1])
    readiness.begin()
    assert readiness.missing() == [0, 1]
    assert readiness.mark([1, 0]) == [0]


def test_the_table_in_the_module() -> None:
    readiness = Readiness([[0], [1], [2]])
    order = LaunchOrder(3)
    readiness.mark([1])
    assert order.take_ready(readiness) == []
    readiness.mark([0])
    assert order.take_ready(readiness) == [0, 1]
    readiness.mark([2])
    assert order.take_ready(readiness) == [2]
    assert order.all_launched


@given(bucketings(), st.data())
def test_whatever_the_order_of_arrival_buckets_launch_in_order_and_once(
    buckets: list[list[int]], data: st.DataObject
) -> None:
    count = sum(len(bucket) for bucket in buckets)
    arrivals = data.draw(st.permutations(range(count)))
    readiness = Readiness(buckets)
    order = LaunchOrder(len(buckets))
    launched: list[int] = []
    for step, index in enumerate(arrivals, start=1):
        readiness.mark([index])
        launched += order.take_ready(readiness)
        arrived = set(arrivals[:step])
        complete = [arrived.issuperset(bucket) for bucket in buckets]
        # As far as possible: everything before the first incomplete bucket is launched.
        assert launched == list(range((*complete, False).index(False)))
    assert order.all_launched


@given(bucketings(), st.data())
def test_marking_in_batches_is_marking_one_by_one(
    buckets: list[list[int]], data: st.DataObject
) -> None:
    count = sum(len(bucket) for bucket in buckets)
    arrivals = data.draw(st.permutations(range(count)))
    cut = data.draw(st.integers(0, count))
    one_by_one, batched = Readiness(buckets), Readiness(buckets)
    completed = [bucket for index in arrivals for bucket in one_by_one.mark([index])]
    assert completed == batched.mark(arrivals[:cut]) + batched.mark(arrivals[cut:])

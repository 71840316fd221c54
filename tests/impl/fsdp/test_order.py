"""Execution order and prefetch decisions: examples, and torch's bookkeeping as oracle."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.fsdp import BackwardPrefetch
from torch.distributed.fsdp._exec_order_utils import _ExecOrderData

from impl.fsdp.phases import UnitPhase
from impl.fsdp.step.order import ExecutionOrder, first_disagreement, unit_to_prefetch

NAMES = {0: ["a.weight"], 1: ["b.weight", "b.bias"], 2: ["c.weight"]}
FORWARD = UnitPhase.FORWARD
PRE, POST = UnitPhase.BACKWARD_PRE, UnitPhase.BACKWARD_POST


def order_of(*units: int) -> ExecutionOrder:
    order = ExecutionOrder()
    for unit in units:
        order.record_pre_forward(unit)
        order.record_post_forward(unit)
    return order


def test_forward_follows_the_first_iteration() -> None:
    order = order_of(0, 1, 2)
    order.end_iteration()
    order.record_pre_forward(2)
    assert [order.after_in_forward(u) for u in (0, 1, 2)] == [1, 2, None]


def test_backward_reverses_this_iteration() -> None:
    order = order_of(0, 1, 2)
    assert [order.after_in_backward(u) for u in (2, 1, 0)] == [1, 0, None]
    order.end_iteration()
    assert order.after_in_backward(2) is None


def test_a_unit_that_runs_twice_keeps_its_first_position() -> None:
    order = order_of(0, 1, 2, 1)
    assert order.after_in_backward(1) == 0


def test_the_first_unit_takes_its_last_position_as_in_torch() -> None:
    assert order_of(0, 1, 0).after_in_backward(0) == 1


@pytest.mark.parametrize(
    ("phase", "policy", "forward_prefetch", "expected"),
    [
        (FORWARD, BackwardPrefetch.BACKWARD_PRE, True, 2),
        (FORWARD, BackwardPrefetch.BACKWARD_PRE, False, None),
        (PRE, BackwardPrefetch.BACKWARD_PRE, False, 0),
        (PRE, BackwardPrefetch.BACKWARD_POST, True, None),
        (POST, BackwardPrefetch.BACKWARD_POST, False, 0),
        (POST, BackwardPrefetch.BACKWARD_PRE, False, None),
        (PRE, None, False, None),
    ],
)
def test_what_is_prefetched_for_the_middle_unit(
    phase: UnitPhase,
    policy: BackwardPrefetch | None,
    forward_prefetch: bool,
    expected: int | None,
) -> None:
    assert unit_to_prefetch(order_of(0, 1, 2), 1, phase, policy, forward_prefetch) == expected


def test_prefetch_outside_of_computation_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="Prefetching is only supported"):
        unit_to_prefetch(order_of(0), 0, UnitPhase.IDLE, None, False)


def test_deviations_are_reported_in_one_iteration_only() -> None:
    order = order_of(0, 1)
    order.end_iteration()
    assert order.check_forward(0) is None
    deviation = order.check_forward(2)
    assert deviation is not None
    assert deviation.message(3, NAMES) == (
        "Forward order differs from that of the first iteration on rank 3. Collectives are "
        "unchecked and may give incorrect results or hang.\n"
        "Expected to all-gather for [['b.weight', 'b.bias']] but trying to all-gather parameters "
        "for [['c.weight']]"
    )
    extra = order.check_forward(1)
    assert extra is not None
    assert "not all-gather any more parameters" in extra.message(3, NAMES)
    order.end_iteration()
    assert order.check_forward(2) is None


def test_ranks_that_gather_different_units() -> None:
    assert first_disagreement([1, 1, 1], NAMES) is None
    message = first_disagreement([0, 0, 2], NAMES)
    assert message is not None
    assert "rank 0 is all-gathering parameters for [['a.weight']]" in message
    assert "rank 2 is all-gathering parameters for [['c.weight']]" in message


class FakeHandle:
    """What torch's bookkeeping writes to."""

    def __init__(self) -> None:
        self._pre_forward_order_index: int | None = None
        self._post_forward_index: int | None = None


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=7), min_size=1, max_size=3))
def test_positions_are_those_of_torch(iterations: list[list[int]]) -> None:
    ours = ExecutionOrder()
    theirs: Any = _ExecOrderData(dist.DebugLevel.OFF, 1, 1)
    handles = [FakeHandle() for _ in range(4)]
    for units in iterations:
        for unit in units:
            ours.record_pre_forward(unit)
            theirs.record_pre_forward(handles[unit], True)
            ours.record_post_forward(unit)
            theirs.record_post_forward(handles[unit])
        for unit, handle in enumerate(handles):
            expected = theirs.get_handle_to_forward_prefetch(handle)
            got = ours.after_in_forward(unit)
            assert (None if got is None else handles[got]) is expected
            expected = theirs.get_handle_to_backward_prefetch(handle)
            got = ours.after_in_backward(unit)
            assert (None if got is None else handles[got]) is expected
        ours.end_iteration()
        theirs.next_iter()
        for handle in handles:
            handle._post_forward_index = None


def test_a_unit_awaits_its_forward_until_it_runs() -> None:
    order = ExecutionOrder()
    assert not order.awaits_forward(0)
    order.begin_forward([0, 1])
    order.record_pre_forward(0)
    assert [order.awaits_forward(unit) for unit in (0, 1)] == [False, True]


def test_a_unit_awaits_its_backward_until_it_runs_or_the_backward_is_over() -> None:
    order = ExecutionOrder()
    for unit in (0, 1, 2):
        order.expect_backward(unit, expected=True)
    order.expect_backward(0, expected=False)
    order.record_backward(1)
    assert [order.awaits_backward(unit) for unit in (0, 1, 2)] == [False, False, True]
    order.end_iteration()
    assert not order.awaits_backward(2)

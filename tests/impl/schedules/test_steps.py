"""Regions of memory, and the executor's rule about which step waits for which."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from impl.schedules.arithmetic import factors_of, log2_ceil, round_up, starts_of
from impl.schedules.executor import Pending, execute
from impl.schedules.ring import all_reduce_geometry, reduce_geometry
from impl.schedules.steps import (
    Accumulate,
    Copy,
    Fence,
    Fold,
    Receive,
    Region,
    Schedule,
    Send,
    Step,
    input_,
    output,
    scratch,
)
from impl.testing.mailbox import ArrayMemory, RankBuffers, StuckError, run_on_all_ranks


def test_regions_overlap_when_they_share_a_byte_of_one_buffer() -> None:
    assert output(0, 4).overlaps(output(3, 1))
    assert not output(0, 4).overlaps(output(4, 4))
    assert not output(0, 4).overlaps(scratch(0, 4))
    assert not output(2, 0).overlaps(output(0, 4))
    assert not output(0, 4).overlaps(output(2, 0))


@dataclass
class ManualTransfer:
    done: bool = False


@dataclass
class ManualPort:
    """Transfers end when the test says so."""

    started: list[ManualTransfer] = field(default_factory=list)
    flushes: int = 0

    def send(self, to: int, data: memoryview) -> Pending:
        return self._start()

    def receive(self, source: int, into: memoryview) -> Pending:
        return self._start()

    def flush(self) -> None:
        self.flushes += 1

    def _start(self) -> ManualTransfer:
        self.started.append(ManualTransfer())
        return self.started[-1]


A, B = output(0, 4), output(4, 4)
HELD_BACK_BY_A_RECEIVE_INTO_A: list[Step] = [
    Send(1, A),
    Receive(1, A),
    Accumulate(A, B),
    Accumulate(B, A),
    Fold(A, (B, B)),
    Fold(B, (B, A)),
    Copy(A, B),
    Copy(B, A),
    Fence(),
]
HELD_BACK_BY_A_SEND_FROM_A: list[Step] = [
    Receive(1, A),
    Accumulate(A, B),
    Fold(A, (B, B)),
    Copy(A, B),
    Fence(),
]
FREE_TO_GO: list[tuple[Step, Step]] = [
    (Receive(1, A), Send(1, B)),
    (Receive(1, A), Receive(1, B)),
    (Receive(1, A), Accumulate(B, scratch(0, 4))),
    (Send(1, A), Send(1, A)),
    (Send(1, A), Accumulate(B, A)),
    (Send(1, A), Copy(B, A)),
    (Receive(1, scratch(0, 0)), Send(1, scratch(0, 0))),
]


def start(*steps: Step) -> tuple[ManualPort, Pending | None]:
    memory = ArrayMemory(
        np.zeros(8, np.uint8), np.zeros(8, np.uint8), np.zeros(8, np.uint8), np.add
    )
    port = ManualPort()
    return port, next(execute(Schedule(steps), memory, port), None)


@pytest.mark.parametrize("step", HELD_BACK_BY_A_RECEIVE_INTO_A, ids=repr)
def test_a_step_waits_for_a_receive_that_it_would_see(step: Step) -> None:
    port, waiting_for = start(Receive(1, A), step, Send(2, scratch(0, 1)))
    assert waiting_for is port.started[0]
    assert len(port.started) == 1


@pytest.mark.parametrize("step", HELD_BACK_BY_A_SEND_FROM_A, ids=repr)
def test_a_step_waits_for_a_send_that_would_see_it(step: Step) -> None:
    port, waiting_for = start(Send(1, A), step, Send(2, scratch(0, 1)))
    assert waiting_for is port.started[0]
    assert len(port.started) == 1


@pytest.mark.parametrize(("first", "second"), FREE_TO_GO, ids=repr)
def test_other_steps_go_ahead(first: Step, second: Step) -> None:
    port, _ = start(first, second, Send(2, scratch(0, 1)))
    assert len(port.started) >= 2
    assert isinstance(port.started[-1], ManualTransfer)


def test_a_schedule_ends_when_its_last_transfer_has_ended() -> None:
    port, waiting_for = start(Send(1, A))
    assert waiting_for is port.started[0]


def test_work_is_sent_off_before_a_reduction() -> None:
    port, _ = start(Accumulate(A, B))
    assert port.flushes == 1


def test_the_mailbox_notices_a_deadlock_a_lost_message_and_a_wrong_size() -> None:
    buffers = [RankBuffers(np.zeros(8, np.uint8), np.zeros(8, np.uint8)) for _ in range(2)]
    with pytest.raises(StuckError, match=r"ranks \[0\]"):
        run_on_all_ranks([Schedule((Receive(1, A),)), Schedule(())], buffers)
    with pytest.raises(AssertionError):
        run_on_all_ranks([Schedule((Send(1, A),)), Schedule(())], buffers)
    with pytest.raises(AssertionError, match="which wants 1"):
        run_on_all_ranks([Schedule((Send(1, A),)), Schedule((Receive(0, output(0, 1)),))], buffers)


def test_a_rank_cannot_reach_outside_of_its_buffers() -> None:
    with pytest.raises(AssertionError, match="outside"):
        start(Copy(A, input_(6, 4)))


@given(
    nbytes=st.integers(1, 1 << 24),
    itemsize=st.sampled_from([1, 2, 4, 8]),
    world_size=st.integers(2, 40),
    limit=st.sampled_from([7, 64, 1 << 20]),
)
def test_ring_segments_cover_the_tensor_once_and_hold_whole_elements(
    nbytes: int, itemsize: int, world_size: int, limit: int
) -> None:
    total = round_up(nbytes, itemsize)
    for geometry in (all_reduce_geometry, reduce_geometry):
        shape = geometry(total, itemsize, world_size, limit)
        assert shape.segment_nbytes % itemsize == 0
        assert shape.segment_nbytes <= max(limit, itemsize)
        assert shape.segment_count * shape.segment_nbytes >= total
        assert shape.segments_per_rank >= 2
        chunks: list[Region] = [shape.chunk(rank) for rank in range(world_size)]
        assert sum(chunk.nbytes for chunk in chunks) == total


def test_arithmetic() -> None:
    assert [log2_ceil(n) for n in (1, 2, 3, 4, 5, 1024)] == [0, 1, 2, 2, 3, 10]
    assert starts_of([3, 0, 2]) == [0, 3, 3, 5]
    assert factors_of(24, 8) == (8, 3)
    assert factors_of(24, 2) is None
    assert factors_of(1, 8) == ()

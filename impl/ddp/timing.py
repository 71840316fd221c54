"""Timers and iteration counts of DDP: when forward, backward and communication begin and end.

Sampled: the first ten iterations, then one in a hundred. Moments are named as in torch's Timer.
"""

from __future__ import annotations

import time
from enum import Enum, auto

from impl.device import DeviceHandle, TimeMark

ALWAYS_SAMPLED_ITERATIONS = 10
DEFAULT_SAMPLE_RATE = 100


class Moment(Enum):
    FORWARD_START = auto()
    BACKWARD_COMPUTE_START = auto()
    BACKWARD_COMPUTE_END = auto()
    BACKWARD_COMM_START = auto()
    BACKWARD_COMM_END = auto()


class SampledTimes:
    """Marks of the iteration that was sampled last. None on modules that span several GPUs."""

    def __init__(self, device: DeviceHandle) -> None:
        self._device = device
        self._marks: dict[Moment, TimeMark] = {}

    def record(self, moment: Moment) -> None:
        self._marks[moment] = self._device.mark()

    def wall_ns(self, moment: Moment) -> int | None:
        """When `moment` happened, in nanoseconds since the epoch."""
        mark = self._marks.get(moment)
        return None if mark is None else mark.wall_ns()

    def elapsed_ns(self, start: Moment, end: Moment) -> int | None:
        """From `start` to `end`; None if one of them did not happen, or they are of two passes."""
        first, second = self._marks.get(start), self._marks.get(end)
        if first is None or second is None:
            return None
        return second.ns_since(first)


def is_sampled(iteration: int, sample_rate: int) -> bool:
    """Whether statistics are taken in this iteration, counted from 1."""
    return iteration > 0 and (
        iteration <= ALWAYS_SAMPLED_ITERATIONS or iteration % sample_rate == 0
    )


class Statistics:
    """Counts iterations and takes their times, if they are sampled."""

    def __init__(self, param_count: int, timer: SampledTimes | None) -> None:
        self.timer = timer
        self.iteration = 0  # synchronised forward passes so far
        self.sample_rate = DEFAULT_SAMPLE_RATE
        self.ready_at_ns = [0] * param_count  # by parameter, of the last backward pass
        self.backward_start_ns = 0

    def sampled(self) -> bool:
        return is_sampled(self.iteration, self.sample_rate)

    def record(self, moment: Moment) -> None:
        if self.timer is not None and self.sampled():
            self.timer.record(moment)

    def begin_forward(self) -> None:
        self.iteration += 1
        self.record(Moment.FORWARD_START)

    def begin_backward(self) -> None:
        self.backward_start_ns = time.time_ns()
        self.record(Moment.BACKWARD_COMPUTE_START)

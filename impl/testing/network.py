"""Byte streams between simulated ranks, cut and delayed as TCP may do.

Bytes are late, arrive in portions that have nothing to do with how they were written, and are
taken in portions of any size. They are never lost or reordered: a stream either delivers or
breaks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from impl.testing.clock import SimulatedClock


@dataclass(frozen=True, slots=True)
class Weather:
    """How awkward. The delay of each portion of bytes is drawn evenly between the two bounds."""

    delay_min_s: float = 10e-6
    delay_max_s: float = 2e-3
    capacity_nbytes: int = 256 << 10  # of one direction of one connection: written, not yet read
    partial: float = 0.3  # the chance that a write or read takes only a part


CALM = Weather(delay_min_s=20e-6, delay_max_s=20e-6, capacity_nbytes=1 << 30, partial=0.0)


class Pipe:
    """One direction of a connection."""

    def __init__(self, clock: SimulatedClock, random: Random, weather: Weather) -> None:
        self.on_arrival: Callable[[], None] = lambda: None  # bytes or the end can be read
        self.on_room: Callable[[], None] = lambda: None  # bytes can be written again
        self._clock = clock
        self._random = random
        self._weather = weather
        self._arrived: deque[memoryview] = deque()
        self._held_nbytes = 0  # written and not yet read
        self._last_due_s = 0.0
        self._is_ended = False  # the end can be read, after what has arrived
        self._is_broken = False

    def write(self, buffers: Sequence[memoryview]) -> int:
        if self._is_broken:
            raise BrokenPipeError(32, "Broken pipe")
        room = self._weather.capacity_nbytes - self._held_nbytes
        wanted = sum(len(buffer) for buffer in buffers)
        count = min(wanted, room)
        if wanted and not count:
            raise BlockingIOError
        if count > 1 and self._random.random() < self._weather.partial:
            count = self._random.randint(1, count)
        data = b"".join(buffers)[:count]
        self._held_nbytes += count
        self._later(lambda: self._arrive(data))
        return count

    def _later(self, event: Callable[[], None]) -> None:
        delay_s = self._random.uniform(self._weather.delay_min_s, self._weather.delay_max_s)
        self._last_due_s = max(self._last_due_s, self._clock.now() + delay_s)
        self._clock.call_at(self._last_due_s, event)

    def _arrive(self, data: bytes) -> None:
        if not self._is_broken:
            self._arrived.append(memoryview(data))
            self.on_arrival()

    def read_into(self, buffer: memoryview) -> int:
        if self._is_broken:
            raise ConnectionResetError(104, "Connection reset by peer")
        if not self._arrived:
            if self._is_ended:
                return 0
            raise BlockingIOError
        data = self._arrived[0]
        count = min(len(data), len(buffer))
        if count > 1 and self._random.random() < self._weather.partial:
            count = self._random.randint(1, count)
        buffer[:count] = data[:count]
        if count == len(data):
            self._arrived.popleft()
        else:
            self._arrived[0] = data[count:]
        if self._held_nbytes >= self._weather.capacity_nbytes:
            self.on_room()
        self._held_nbytes -= count
        return count

    def has_something_to_read(self) -> bool:
        return bool(self._arrived) or self._is_ended or self._is_broken

    def hold(self, seconds: float) -> None:
        """What is written from now on arrives at the earliest in so many seconds."""
        self._last_due_s = max(self._last_due_s, self._clock.now() + seconds)

    def end(self) -> None:
        """The writer closes: what is under way still arrives."""
        self._later(self._end_now)

    def _end_now(self) -> None:
        self._is_ended = True
        self.on_arrival()

    def break_off(self) -> None:
        """Nothing arrives any more, and both ends are told."""
        self._is_broken = True
        self.on_arrival()
        self.on_room()


class PipeEnd:
    """One end of a connection. See `ByteStream` in `impl.transport.messages.hub`."""

    def __init__(self, incoming: Pipe, outgoing: Pipe) -> None:
        self._incoming = incoming
        self._outgoing = outgoing
        self.wants_write = False
        self.is_closed = False

    def recv_into(self, buffer: memoryview, /) -> int:
        return self._incoming.read_into(buffer)

    def sendmsg(self, buffers: Sequence[memoryview], /) -> int:
        return self._outgoing.write(buffers)

    def want_write(self, wanted: bool) -> None:
        self.wants_write = wanted

    def has_something_to_read(self) -> bool:
        return self._incoming.has_something_to_read()

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self._outgoing.end()

    def hold(self, seconds: float) -> None:
        self._outgoing.hold(seconds)

    def break_off(self) -> None:
        """The connection breaks in the middle, in both directions."""
        self._incoming.break_off()
        self._outgoing.break_off()


def connection(
    clock: SimulatedClock, random: Random, weather: Weather
) -> tuple[tuple[PipeEnd, Pipe, Pipe], tuple[PipeEnd, Pipe, Pipe]]:
    """Both ends of a new connection, each with its incoming and its outgoing pipe."""
    there, back = Pipe(clock, random, weather), Pipe(clock, random, weather)
    return (PipeEnd(back, there), back, there), (PipeEnd(there, back), there, back)

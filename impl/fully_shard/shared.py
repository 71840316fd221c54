"""What the units of one model share: streams, and what is in flight on them.

[Note: Streams of fully_shard]
On a device the host only issues work; streams decide what runs beside what.

    stream     work
    current    compute: forward, backward, optimizer; copies of what was gathered into whole
               parameters, and of gradients into what is reduced
    gather     copies of shards, and all-gathers. Wait for `current` once a step: the optimizer has
               written the shards
    reduce     reduce-scatters. Wait for `current`, so that the gradients are there
    replica    all-reduces over replicas. Wait for `reduce`

`current` waits for `gather` before it uses whole parameters, and for the others at the end of the
backward. The inputs of reduce-scatters are kept by `InFlight` until they have been read; of other
memory that a second stream uses the allocator is told (`record_stream`). Whole parameters are
allocated, filled, used and freed on `current` alone, so their memory can be freed at once.

So in a backward the all-gather of the next unit, the gradients of this one and the reduce-scatter
of the one before run at the same time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from impl.device import DeviceHandle


class InFlight(NamedTuple):
    """The input of a reduce-scatter, and when it will have been read."""

    rows: Tensor
    is_read: Any


class Event(NamedTuple):
    """One line of a schedule."""

    what: str
    unit: str

    def __str__(self) -> str:
        return f"{self.what:14} {self.unit or '(root)'}"


@dataclass
class Shared:
    """Of all units below one root; before the first forward, of each unit alone.

    gradient_streams: those on which work on gradients may be left; a set, in order.
    in_flight_max: how many inputs of reduce-scatters may be kept at once.
    """

    device: DeviceHandle
    gather_stream: Any = field(init=False)  # see [Note: Streams of fully_shard]
    reduce_stream: Any = field(init=False)
    replica_stream: Any = field(init=False)
    in_flight: list[InFlight] = field(default_factory=list)
    gradient_streams: dict[Any, None] = field(default_factory=dict)
    in_flight_max: int = 1
    events: list[Event] | None = None

    def __post_init__(self) -> None:
        self.gather_stream = self.device.new_stream()
        self.reduce_stream = self.device.new_stream()
        self.replica_stream = self.device.new_stream()

    def note(self, what: str, unit_name: str) -> None:
        if self.events is not None:
            self.events.append(Event(what, unit_name))

    def make_room(self) -> None:
        """Before another reduce-scatter: free the oldest inputs, once they have been read."""
        while len(self.in_flight) >= self.in_flight_max:
            self.device.current_stream().wait_event(self.in_flight.pop(0).is_read)

    def wait_for_gradients(self) -> None:
        """The current stream goes on when all gradients are in the parameters."""
        current = self.device.current_stream()
        for stream in self.gradient_streams:
            current.wait_stream(stream)
        self.gradient_streams.clear()
        for _, is_read in self.in_flight:
            current.wait_event(is_read)
        self.in_flight.clear()

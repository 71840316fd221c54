"""One simulation as data: what all ranks run, what goes wrong and when, and how bytes travel."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from hypothesis import strategies as st

from impl.testing import faults
from impl.testing.faults import Abort, Cut, Fault, Freeze, Hold, Kill, Pause
from impl.testing.network import Weather

OPERATIONS = (
    *("all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter", "gather", "scatter"),
    *("all_to_all", "barrier", "ring", "from_any"),
)
HARMLESS = (Pause, Hold)  # ranks notice nothing but the time

_NUMELS = (0, 1, 5, 1000, 17_000)  # the largest is neither staged nor eager
_SECONDS = (0.001, 0.1, 5.0)  # of several together, less than an operation may take
_EVENTS_MAX = 300
_FAULTS_MAX = 3
_STEPS_MAX = 8


@dataclass(frozen=True)
class Step:
    """One call on all ranks. numel: of each rank's contribution. root: where there is one."""

    operation: str
    numel: int
    root: int


@dataclass(frozen=True)
class Schedule:
    """mode: of pygloo's sockets, "tcp" or "gloo". seed: decides the order of events."""

    world_size: int
    mode: str
    seed: int
    steps: tuple[Step, ...]
    faults: tuple[Fault, ...]
    weather: Weather

    @property
    def deadly(self) -> tuple[Fault, ...]:
        return tuple(fault for fault in self.faults if not isinstance(fault, HARMLESS))

    @property
    def held_s(self) -> float:
        """How long the harmless faults may hold up everything."""
        return sum(fault.seconds for fault in self.faults if isinstance(fault, HARMLESS))

    def to_json(self) -> str:
        plain = asdict(self)
        for fault, fields in zip(self.faults, plain["faults"], strict=True):
            fields["kind"] = type(fault).__name__
        return json.dumps(plain)

    @staticmethod
    def from_json(text: str) -> Schedule:
        plain = json.loads(text)
        plain["steps"] = tuple(Step(**step) for step in plain["steps"])
        plain["faults"] = tuple(_fault(**fields) for fields in plain["faults"])
        plain["weather"] = Weather(**plain["weather"])
        return Schedule(**plain)


def _fault(kind: str, **fields: object) -> Fault:
    values = {key: tuple(v) if isinstance(v, list) else v for key, v in fields.items()}
    fault: Fault = getattr(faults, kind)(**values)
    return fault


@st.composite
def schedules(draw: st.DrawFn, world_size: int, mode: str) -> Schedule:
    """Shrinks towards one small step, no fault and calm weather."""
    rank = st.integers(0, world_size - 1)
    step = st.builds(Step, st.sampled_from(OPERATIONS), st.sampled_from(_NUMELS), rank)
    weather = st.builds(
        Weather,
        capacity_nbytes=st.sampled_from((1 << 20, 20_000, 2_000)),
        partial=st.sampled_from((0.0, 0.3, 0.9)),
    )
    return Schedule(
        world_size,
        mode,
        seed=draw(st.integers(0, 2**32 - 1)),
        steps=tuple(draw(st.lists(step, min_size=1, max_size=_STEPS_MAX))),
        faults=tuple(draw(st.lists(_faults(world_size), max_size=_FAULTS_MAX, unique=True))),
        weather=draw(weather),
    )


def _faults(world_size: int) -> st.SearchStrategy[Fault]:
    rank, events = st.integers(0, world_size - 1), st.integers(0, _EVENTS_MAX)
    seconds = st.sampled_from(_SECONDS)
    two = st.permutations(range(world_size)).map(lambda order: order[:2])
    some = st.sets(rank, min_size=1, max_size=world_size - 1)
    return st.one_of(
        st.builds(Pause, rank, events, seconds),
        st.builds(
            lambda rank, events, some, seconds: Hold(
                rank,
                events,
                tuple(sorted(some)),
                tuple(sorted(set(range(world_size)) - some)),
                seconds,
            ),
            *(rank, events, some, seconds),
        ),
        st.builds(Kill, rank, events),
        st.builds(lambda ends, events: Cut(ends[0], ends[1], events), two, events),
        st.builds(Freeze, rank, events),
        st.builds(Abort, rank, events),
    )

"""Execution order of units: recording, checks for changes or mismatches, next unit to prefetch.

Pure bookkeeping over unit numbers (the position of a unit's handle among all handles of the root,
the same on every rank). The runtime records, asks, and acts.

The order of forwards is taken from the first iteration and fixed: explicit forward prefetching is
for static graphs. The order of backwards is the reverse of what the current iteration's forwards
recorded. For the units a, b, c, run in that order, and a prefetch one unit ahead:

    forward of a      gather a, gather b early           (forward_prefetch=True)
    backward of c     gather c, gather b early           (BACKWARD_PRE)
    backward of b     b is there, gather a early
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from torch.distributed.fsdp import BackwardPrefetch

from impl.fsdp.phases import UnitPhase


class _Deviation(Enum):
    """Whether forwards have deviated from the first iteration's order."""

    NONE = auto()
    WARNING = auto()  # in this iteration: every further deviation is reported too
    WARNED = auto()  # in an earlier one: enough has been said


class ExecutionOrder:
    """The recorded orders of the units under one root."""

    def __init__(self) -> None:
        self.iteration = 0
        self._pre_forward: list[int] = []
        self._pre_forward_position: dict[int, int] = {}
        self._post_forward: list[int] = []
        self._post_forward_position: dict[int, int] = {}
        self._awaits_forward: set[int] = set()
        self._awaits_backward: set[int] = set()
        self._forwards_checked = 0
        self._deviation = _Deviation.NONE

    def __repr__(self) -> str:
        return (
            f"ExecutionOrder(iteration {self.iteration}, forward {self._pre_forward}, "
            f"this iteration so far {self._post_forward})"
        )

    @property
    def is_first_iteration(self) -> bool:
        return self.iteration == 0

    def record_pre_forward(self, unit: int) -> None:
        """Record a forward of `unit`. Only its first run in the first iteration counts."""
        self._awaits_forward.discard(unit)
        if self.is_first_iteration and unit not in self._pre_forward_position:
            self._pre_forward_position[unit] = len(self._pre_forward)
            self._pre_forward.append(unit)

    def record_post_forward(self, unit: int) -> None:
        """`unit` has run forward, and a backward may follow.

        A unit that runs several times keeps the position of its first run, except the very first
        unit, which takes that of its last one. torch chooses so; the choice decides which
        all-gather comes next and must be the same on ranks that run torch's FSDP.
        """
        if self._post_forward_position.get(unit, 0) == 0:
            self._post_forward_position[unit] = len(self._post_forward)
        self._post_forward.append(unit)

    def begin_forward(self, units: Iterable[int]) -> None:
        """A forward of the root begins, in which all `units` are expected to run."""
        self._awaits_forward.update(units)

    def awaits_forward(self, unit: int) -> bool:
        """Whether `unit` has not run since the forward of the root began."""
        return unit in self._awaits_forward

    def expect_backward(self, unit: int, *, expected: bool) -> None:
        """A forward of `unit` has ended, from which gradients will come back or not."""
        if expected:
            self._awaits_backward.add(unit)
        else:
            self._awaits_backward.discard(unit)

    def record_backward(self, unit: int) -> None:
        """The backward of `unit` has begun."""
        self._awaits_backward.discard(unit)

    def awaits_backward(self, unit: int) -> bool:
        """Whether a backward of `unit` is still to come."""
        return unit in self._awaits_backward

    def after_in_forward(self, unit: int) -> int | None:
        """The unit whose forward came after that of `unit` in the first iteration."""
        position = self._pre_forward_position.get(unit)
        if position is None or position + 1 >= len(self._pre_forward):
            return None
        return self._pre_forward[position + 1]

    def after_in_backward(self, unit: int) -> int | None:
        """The unit whose backward is expected after that of `unit` in this iteration."""
        position = self._post_forward_position.get(unit)
        if position is None or position == 0:
            return None
        return self._post_forward[position - 1]

    def check_forward(self, unit: int) -> ForwardDeviation | None:
        """Compare a forward with the first iteration's; after one bad iteration no more."""
        if self.is_first_iteration or self._deviation is _Deviation.WARNED:
            return None
        position = self._forwards_checked
        self._forwards_checked += 1
        expected = self._pre_forward[position] if position < len(self._pre_forward) else None
        if expected == unit:
            return None
        self._deviation = _Deviation.WARNING
        return ForwardDeviation(expected=expected, actual=unit)

    def end_iteration(self) -> None:
        """The backward pass has ended."""
        self.iteration += 1
        self._post_forward.clear()
        self._post_forward_position.clear()
        self._awaits_backward.clear()
        self._forwards_checked = 0
        if self._deviation is _Deviation.WARNING:
            self._deviation = _Deviation.WARNED


@dataclass(frozen=True)
class ForwardDeviation:
    """A forward that differs from the first iteration's here (`expected` None: its end)."""

    expected: int | None
    actual: int

    def message(self, rank: int, names: Mapping[int, Sequence[str]]) -> str:
        """torch's warning; `names` are the parameters of each unit."""
        actual = _names(self.actual, names) or "a newly-added parameter since construction time"
        what = (
            "Expected to not all-gather any more parameters in the forward but trying to "
            "all-gather parameters for "
            if self.expected is None
            else f"Expected to all-gather for {_names(self.expected, names)} but trying to "
            "all-gather parameters for "
        )
        return (
            f"Forward order differs from that of the first iteration on rank {rank}. Collectives "
            f"are unchecked and may give incorrect results or hang.\n{what}{actual}"
        )


def first_disagreement(units: Sequence[int], names: Mapping[int, Sequence[str]]) -> str | None:
    """The message if ranks are about to gather different units; `units` has one entry per rank."""
    for rank, unit in enumerate(units):
        if unit != units[0]:
            return (
                "Forward order differs across ranks: rank 0 is all-gathering parameters for "
                f"{_names(units[0], names)} while rank {rank} is all-gathering parameters for "
                f"{_names(unit, names)}"
            )
    return None


def _names(unit: int, names: Mapping[int, Sequence[str]]) -> list[list[str]]:
    """As torch prints them: a list for each flat parameter, of which there is one."""
    return [list(names[unit])] if unit in names else []


def unit_to_prefetch(
    order: ExecutionOrder,
    unit: int,
    phase: UnitPhase,
    backward_prefetch: BackwardPrefetch | None,
    forward_prefetch: bool,
) -> int | None:
    """The unit to gather early while `unit`, in `phase`, is being worked on, or None.

    That unit may have run already (`awaits_forward`, `awaits_backward`), or be prefetched.
    """
    if phase is UnitPhase.FORWARD:
        return order.after_in_forward(unit) if forward_prefetch else None
    when = {
        UnitPhase.BACKWARD_PRE: BackwardPrefetch.BACKWARD_PRE,
        UnitPhase.BACKWARD_POST: BackwardPrefetch.BACKWARD_POST,
    }
    if phase not in when:
        raise AssertionError(
            "Prefetching is only supported in forward, pre-backward and post-backward but "
            f"currently in {phase}"
        )
    return order.after_in_backward(unit) if when[phase] == backward_prefetch else None

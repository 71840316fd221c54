"""Access to all ranks' slots in shared memory: addresses, tensor views, tables of sizes.

Each collective (`reducing.py`, `copying.py`) is a loop over segments. For each segment a rank
writes into its own slot, waits until all have written, and reads the other slots. The first round
also compares what the ranks announced, before any tensor changes.

[Note: places] Writing what another processor has just read is slow, since each line has to be
called back from its cache: 64 KiB take 8 us, and reading them there 3. So an operation that is over
in one round does not write to the start of its half each time, but to one place after the other.
When a place comes again, with two ranks 2 MiB later, its lines have left that cache.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Concatenate, ParamSpec, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from impl import errors
from impl.transport.base import CallInfo
from impl.transport.end_cause import EndCause
from impl.transport.lent import MemoryGone
from impl.transport.shm.membership import Membership
from impl.transport.shm.registered import Registered
from impl.transport.shm.rounds import Rounds

_P = ParamSpec("_P")
_R = TypeVar("_R")
_S = TypeVar("_S", bound="Collectives")

Table = np.ndarray[tuple[int, int], np.dtype[np.int64]]

# As long as all ranks' tensors together take no more than this, every rank reduces everything for
# itself: one round instead of two, but n-1 times the arithmetic. Measured on two processors, both
# ways took the same time from 512 KiB a rank on with 4 ranks, 256 KiB with 6, 200 KiB with 3 and 8.
# With two ranks both ways move the same bytes, so the shorter one always wins.
_WHOLE_TOTAL_NBYTES = 1 << 20

_PLACES_FROM_NBYTES = 16 << 10  # less than that, in all places, would not fill a cache
_PLACES_MAX = 32  # of one half, in all ranks' slots together: four ranks gained nothing from more

_PLANS_MAX = 512


@dataclass(frozen=True, slots=True)
class SlotPlan:
    """Where a tensor of one dtype and size lies in every slot, if one round moves it."""

    nbytes: int
    step_mask: int  # of a round's step: the index of its place
    own_addresses: tuple[int, ...]  # by place
    parts: tuple[tuple[Tensor, ...], ...]  # by place, then by position


class Collectives(Protocol):
    """Some of the collectives of one rank."""

    membership: Membership


def ends_the_group(
    method: Callable[Concatenate[_S, _P], _R],
) -> Callable[Concatenate[_S, _P], _R]:
    """An exception in the middle of a collective leaves the ranks out of step: the group ends.

    A mismatch is the exception: every rank raises it at the same step.
    """

    @functools.wraps(method)
    def run(self: _S, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        membership = self.membership
        if membership.fate is not None or membership.board.is_decided():
            membership.raise_fate(_where(membership, args))
        try:
            return method(self, *args, **kwargs)
        except errors.CommunicationError:
            raise
        except MemoryGone as gone:
            where = _where(membership, args)
            text = f"{where}, rank {membership.rank} of {membership.world_size}: {gone}."
            raise membership.give_up(EndCause.ABORT, where, text) from None
        except BaseException as error:
            where = _where(membership, args)
            membership.give_up(EndCause.ABORT, where, f"{where} was interrupted: {error!r}.")
            raise
        finally:
            membership.lent = ()

    return run


class Slots:
    """One rank's access to all slots.

    position: this rank's. parts, results: [half][position], addresses.
    """

    def __init__(self, membership: Membership) -> None:
        layout, mapping = membership.layout, membership.mapping
        self.membership = membership
        self.rounds = Rounds(membership)
        self.registered = Registered(membership, self.rounds)
        self.segment_nbytes = layout.segment_nbytes
        self.position = membership.position
        self.size = membership.size
        self.others = [p for p in range(self.size) if p != self.position]
        self.parts = [
            [mapping.address + layout.parts_offset(p, half) for p in range(self.size)]
            for half in (0, 1)
        ]
        self._table_indices = [  # [half][position]: of the parts, in `u64`
            [layout.parts_offset(p, half) // 8 for p in range(self.size)] for half in (0, 1)
        ]
        self.results = [
            [mapping.address + layout.result_offset(p, half) for p in range(self.size)]
            for half in (0, 1)
        ]
        most = max(1, _PLACES_MAX // self.size)
        self._places = [self._make_places(1 << k) for k in range(most.bit_length())]
        self._plans: dict[tuple[torch.dtype, int], SlotPlan] = {}
        self._whole_views: dict[tuple[torch.dtype, int, int], Tensor] = {}
        self._views_made: dict[tuple[torch.dtype, int, int, int], tuple[Tensor, ...]] = {}
        self._i64 = np.frombuffer(mapping.raw, dtype=np.int64)
        self._whole_nbytes = self.segment_nbytes
        if self.size > 2:
            self._whole_nbytes = min(self.segment_nbytes, _WHOLE_TOTAL_NBYTES // self.size)

    def forget_views(self) -> None:
        """Drop everything that keeps the mapping alive."""
        self._plans.clear()
        self._whole_views.clear()
        self._views_made.clear()
        self._i64 = np.empty(0, dtype=np.int64)
        self.registered.close()

    # -- places

    def _make_places(self, count: int) -> list[list[int]]:
        """`count` of each half, in the order of the rounds that use them: addresses by position."""
        stride = self.segment_nbytes // count
        return [
            [start + number // 2 * stride for start in self.parts[number % 2]]
            for number in range(2 * count)
        ]

    def _places_for(self, nbytes: int) -> list[list[int]]:
        if nbytes < _PLACES_FROM_NBYTES:
            return self._places[0]
        fit = self.segment_nbytes // nbytes
        return self._places[min(fit.bit_length(), len(self._places)) - 1]

    def place(self, nbytes: int) -> list[int]:
        """Where the next round writes `nbytes`, at most a segment: addresses by position.

        The same on all ranks that give the same number. See [Note: places].
        """
        places = self._places_for(nbytes)
        return places[(self.rounds.step + 1) % len(places)]

    # -- views of shared memory

    def plan(self, dtype: torch.dtype, numel: int) -> SlotPlan | None:
        """None for a tensor that needs more than one round."""
        plan = self._plans.get((dtype, numel))
        if plan is not None:
            return plan
        nbytes = numel * dtype.itemsize
        if nbytes > self._whole_nbytes:
            return None
        places = self._places_for(nbytes)
        stride = 2 * self.segment_nbytes // len(places) // dtype.itemsize
        if len(self._plans) >= _PLANS_MAX:
            self._plans.clear()
        plan = self._plans[dtype, numel] = SlotPlan(
            nbytes=nbytes,
            step_mask=len(places) - 1,
            own_addresses=tuple(place[self.position] for place in places),
            parts=tuple(
                self._slices(number % 2, dtype, number // 2 * stride, number // 2 * stride + numel)
                for number in range(len(places))
            ),
        )
        return plan

    def views(self, half: int, dtype: torch.dtype, start: int, stop: int) -> tuple[Tensor, ...]:
        """Elements [start, stop) of every rank's parts, by position."""
        key = (dtype, half, start, stop)
        views = self._views_made.get(key)
        if views is None:
            if len(self._views_made) >= _PLANS_MAX:
                self._views_made.clear()
            views = self._views_made[key] = self._slices(half, dtype, start, stop)
        return views

    def _slices(self, half: int, dtype: torch.dtype, start: int, stop: int) -> tuple[Tensor, ...]:
        return tuple(self._whole_view(half, p, dtype)[start:stop] for p in range(self.size))

    def _whole_view(self, half: int, position: int, dtype: torch.dtype) -> Tensor:
        key = (dtype, half, position)
        view = self._whole_views.get(key)
        if view is None:
            layout = self.membership.layout
            view = self._whole_views[key] = self.membership.mapping.tensor(
                layout.parts_offset(position, half), self.segment_nbytes // dtype.itemsize, dtype
            )
        return view

    def result_view(self, half: int, dtype: torch.dtype, numel: int) -> Tensor:
        layout = self.membership.layout
        return self.membership.mapping.tensor(
            layout.result_offset(self.position, half), numel, dtype
        )

    # -- tables: how ranks learn sizes that only their peers know

    def write_table(self, values: Sequence[int]) -> None:
        first = self._table_indices[self.rounds.half()][self.position]
        self._i64[first : first + len(values)] = values

    def read_tables(self, half: int, length: int) -> Table:
        """(ranks, length): a copy, one row a rank."""
        rows = self._table_indices[half]
        return np.stack([self._i64[first : first + length] for first in rows])


def _where(membership: Membership, args: Sequence[object]) -> str:
    return next(membership.where(arg) for arg in args if isinstance(arg, CallInfo))

"""Access to all ranks' slots in shared memory: addresses, tensor views, tables of sizes.

Each collective (`reducing.py`, `copying.py`) is a loop over segments. For each segment a rank
writes into its own slot, waits until all have written, and reads the other slots. The first round
also compares what the ranks announced, before any tensor changes.
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

_PLANS_MAX = 512


@dataclass(frozen=True, slots=True)
class SlotPlan:
    """Where a tensor of one dtype and size lies in every slot, for one segment."""

    nbytes: int
    own_addresses: tuple[int, int]  # by half
    parts: tuple[tuple[Tensor, ...], tuple[Tensor, ...]]  # by half, then by position


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

    # -- views of shared memory

    def plan(self, dtype: torch.dtype, numel: int) -> SlotPlan | None:
        """None for a tensor that needs more than one round."""
        plan = self._plans.get((dtype, numel))
        if plan is not None:
            return plan
        nbytes = numel * dtype.itemsize
        if nbytes > self._whole_nbytes:
            return None
        if len(self._plans) >= _PLANS_MAX:
            self._plans.clear()
        plan = self._plans[dtype, numel] = SlotPlan(
            nbytes=nbytes,
            own_addresses=(self.parts[0][self.position], self.parts[1][self.position]),
            parts=(self.views(0, dtype, 0, numel), self.views(1, dtype, 0, numel)),
        )
        return plan

    def views(self, half: int, dtype: torch.dtype, start: int, stop: int) -> tuple[Tensor, ...]:
        """Elements [start, stop) of every rank's parts, by position."""
        key = (dtype, half, start, stop)
        views = self._views_made.get(key)
        if views is None:
            if len(self._views_made) >= _PLANS_MAX:
                self._views_made.clear()
            views = self._views_made[key] = tuple(
                self._whole_view(half, p, dtype)[start:stop] for p in range(self.size)
            )
        return views

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

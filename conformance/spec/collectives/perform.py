"""Runs any collective on tensors of any layout, and checks results and surrounding memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
from torch import Tensor

from conformance import Me, assert_each_rank
from conformance.checks import first_difference
from conformance.oracle.collectives import Call, after, before, receives
from conformance.oracle.data import blank, name_of
from conformance.oracle.layout import DENSE, Layout, Placed, place

REDUCE_OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "product": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "band": dist.ReduceOp.BAND,
    "bor": dist.ReduceOp.BOR,
    "bxor": dist.ReduceOp.BXOR,
}


@dataclass(frozen=True, slots=True)
class Placement:
    """How one rank lays out the tensors that it gives and those that it takes."""

    given: Layout = DENSE
    taken: Layout = DENSE


@dataclass(frozen=True, slots=True)
class Seen:
    """One rank's tensors after a call.

    around: the memory in which the given and then the taken tensors lie, with the tensors' own
        elements blanked.
    """

    given: tuple[Tensor, ...]
    taken: tuple[Tensor, ...]
    around: tuple[Tensor, ...] = ()


def perform(
    me: Me,
    call: Call,
    placement: Placement | None = None,
    *,
    group: Any = None,
    reduce_op: Any = None,
) -> Seen:
    """The call, by this rank of the group (default: all ranks), until it is done.

    reduce_op: what to reduce by instead of the call's own.
    """
    given, taken = placed_tensors(me, call, placement, group)
    issue(call, views_of(given), views_of(taken), group, reduce_op=reduce_op)
    return seen_around(given, taken)


@dataclass(frozen=True, slots=True)
class Pending:
    """A call that was issued with async_op, and its tensors."""

    work: Any
    given: list[Placed]
    taken: list[Placed]

    def tensors(self) -> Seen:
        """What they hold now."""
        return seen_of(views_of(self.given), views_of(self.taken))

    def seen(self) -> Seen:
        """The same, and the memory around them, when the call is over."""
        return seen_around(self.given, self.taken)


def perform_async(me: Me, call: Call, placement: Placement | None = None) -> Pending:
    """Begin the call, by this rank of all."""
    given, taken = placed_tensors(me, call, placement)
    return Pending(issue(call, views_of(given), views_of(taken), async_op=True), given, taken)


def placed_tensors(
    me: Me, call: Call, placement: Placement | None = None, group: Any = None
) -> tuple[list[Placed], list[Placed]]:
    """What this rank of the group gives and takes, before the call."""
    buffers = before(call, dist.get_rank(group), dist.get_world_size(group))
    placement = placement or Placement()
    given = [place(values, placement.given, me.device) for values in buffers.given]
    taken = [place(values, placement.taken, me.device) for values in buffers.taken]
    return given, taken


def seen_of(given: Sequence[Tensor], taken: Sequence[Tensor]) -> Seen:
    """Copies of the tensors of a call that used dense ones."""
    return Seen(tuple(x.clone() for x in given), tuple(x.clone() for x in taken))


def seen_around(given: Sequence[Placed], taken: Sequence[Placed]) -> Seen:
    """Copies of the tensors of a call, and the memory that they lie in."""
    seen = seen_of(views_of(given), views_of(taken))
    return replace(seen, around=tuple(_blanked(p) for p in (*given, *taken)))


def issue(
    call: Call,
    given: list[Tensor],
    taken: list[Tensor],
    group: Any = None,
    *,
    async_op: bool = False,
    reduce_op: Any = None,
) -> Any:
    """Call the operation of `torch.distributed`; returns what it returns."""
    op = reduce_op or REDUCE_OPS[call.reduce_op]
    root = dist.get_process_group_ranks(group)[call.root]
    how: dict[str, Any] = {"group": group, "async_op": async_op}
    match call.op:
        case "all_reduce":
            return dist.all_reduce(taken[0], op, **how)
        case "reduce":
            return dist.reduce(taken[0], root, op, **how)
        case "broadcast":
            return dist.broadcast(taken[0], root, **how)
        case "all_gather":
            return dist.all_gather(taken, given[0], **how)
        case "all_gather_into_tensor":
            return all_gather_into_tensor(taken[0], given[0], **how)
        case "gather":
            return dist.gather(given[0], taken or None, root, **how)
        case "scatter":
            return dist.scatter(taken[0], given or None, root, **how)
        case "reduce_scatter":
            return dist.reduce_scatter(taken[0], given, op, **how)
        case "reduce_scatter_tensor":
            return reduce_scatter_tensor(taken[0], given[0], op, **how)
        case "all_to_all":
            return dist.all_to_all(taken, given, **how)
    assert call.op == "all_to_all_single", call.op
    rank = dist.get_rank(group)
    sent = list(call.splits[rank]) if call.splits else None
    received = [row[rank] for row in call.splits] if call.splits else None
    return dist.all_to_all_single(taken[0], given[0], received, sent, **how)


def everyone() -> Any:
    """The group of all ranks, for functions that have none by default."""
    return dist.group.WORLD


def all_gather_into_tensor(*args: Any, **kwargs: Any) -> Any:
    """By its name of torch 2.13 where there is one; the old one warns."""
    return getattr(dist, "all_gather_single", dist.all_gather_into_tensor)(*args, **kwargs)


def reduce_scatter_tensor(*args: Any, **kwargs: Any) -> Any:
    """By its name of torch 2.13 where there is one; the old one warns."""
    return getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)(*args, **kwargs)


def assert_taken(
    call: Call, seen: Sequence[Seen], *, within_ulps: int = 0, ranks: Sequence[int] | None = None
) -> None:
    """Every rank that the call gives a result has what the oracle says.

    ranks: the members of the group, if these are not all ranks.
    """
    want = [after(call, rank, len(seen)).taken for rank in range(len(seen))]
    got = [s.taken if receives(call, r) else want[r] for r, s in enumerate(seen)]
    assert_each_rank(got, want, within_ulps=within_ulps, what=str(call), ranks=ranks)


def assert_nothing_else(
    call: Call,
    seen: Sequence[Seen],
    placements: Sequence[Placement],
    *,
    ranks: Sequence[int] | None = None,
) -> None:
    """Nothing but the outputs has changed: not what was given, nor the memory around anything.

    ranks: the members of the group, if these are not all ranks.
    """
    want = [after(call, rank, len(seen)) for rank in range(len(seen))]
    assert_each_rank(
        [s.given for s in seen],
        [w.given for w in want],
        what=f"{call}: what was only read",
        ranks=ranks,
    )
    assert_each_rank(
        [s.around for s in seen],
        [_around(w, p) for w, p in zip(want, placements, strict=True)],
        what=f"{call}: the memory around the tensors",
        ranks=ranks,
    )


def _around(buffers: Any, placement: Placement) -> tuple[Tensor, ...]:
    """The memory around tensors that lie as a placement says, as `Seen` has it."""
    kinds = ((buffers.given, placement.given), (buffers.taken, placement.taken))
    return tuple(_blanked(place(x, layout)) for tensors, layout in kinds for x in tensors)


def what_else_changed(me: Me, call: Call, placement: Placement) -> str:
    """As `assert_nothing_else`, by the rank itself: of large tensors. "" if nothing has changed."""
    seen = perform(me, call, placement)
    want = after(call, me.rank, me.world_size)
    given = first_difference(tuple(x.cpu() for x in seen.given), tuple(want.given))
    if given:
        return f"what was only read: {given}"
    around = tuple(x.cpu() for x in seen.around)
    found = first_difference(around, _around(want, placement))
    return f"the memory around the tensors: {found}" if found else ""


def assert_all_of(
    call: Call,
    seen: Sequence[Seen],
    placements: Sequence[Placement],
    *,
    around: bool,
    ranks: Sequence[int],
) -> None:
    """around: judge what must not change (`assert_nothing_else`), or the results."""
    if around:
        assert_nothing_else(call, seen, placements, ranks=ranks)
    else:
        assert_taken(call, seen, ranks=ranks)


def _blanked(placed: Placed) -> Tensor:
    memory = placed.memory
    placed.view.copy_(blank(placed.view.shape, name_of(memory.dtype)))
    return memory


def views_of(placed: Sequence[Placed]) -> list[Tensor]:
    """The tensors themselves."""
    return [p.view for p in placed]

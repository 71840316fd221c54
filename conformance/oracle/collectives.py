"""`Call`, a collective as data: its input tensors and its expected results on every rank. Pure: no
ranks, no groups.

[Note: given and taken]
A call has, on each rank, tensors that are *given* (only read) and tensors that are *taken*
(written; those of an operation that works in place start with the rank's contribution).
Collectives differ in how many there are of each on which rank; that is all that a case needs to
know in order to lay them out in memory, issue the call and compare, so the cases of all
collectives can share their code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from conformance.oracle.data import (
    bits,
    blank,
    factors,
    noise,
    noisy_factors,
    positive,
    sample,
)
from conformance.oracle.near import Near
from conformance.oracle.reduction import reduced, rounded

Shape = tuple[int, ...]

# What a `Call` may be of.
COLLECTIVES = (
    "all_reduce",
    "reduce",
    "broadcast",
    "all_gather",
    "all_gather_into_tensor",
    "gather",
    "scatter",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "all_to_all",
    "all_to_all_single",
)


@dataclass(frozen=True, slots=True)
class Call:
    """One collective, as all ranks of a group agree on it.

    shape: of what one rank contributes, to each of the others where it is not the same for all.
    root: source or destination, as a rank of the group.
    splits: `splits[s][d]` rows go from rank s to rank d; () is one block of `shape` to each. Only
        for the operations whose blocks may differ: all_to_all, all_to_all_single.
    stacked: the one-tensor forms lay blocks along a new dimension instead of along the first.
    raw: contributions are any bits, for what is only moved.
    noisy: contributions are random floats, whose sum or product is a matter of rounding.
    salt: tells apart the contributions of several calls.
    """

    op: str
    shape: Shape = (4,)
    dtype: str = "float32"
    reduce_op: str = "sum"
    root: int = 0
    splits: tuple[tuple[int, ...], ...] = ()
    stacked: bool = False
    raw: bool = False
    noisy: bool = False
    salt: int = 0

    def block_shape(self, source: int, destination: int) -> Shape:
        """Shape of what `source` sends to `destination`."""
        if not self.splits:
            return self.shape
        return (self.splits[source][destination], *self.shape[1:])


@dataclass(frozen=True, slots=True)
class Buffers:
    """One rank's tensors of one call, before or after it."""

    given: tuple[Tensor, ...]
    taken: tuple[Tensor, ...]


_MAKERS = {"product": factors, "avg": positive}
_NOISY_MAKERS = {"product": noisy_factors}


def contribution(call: Call, rank: int, to: int = 0) -> Tensor:
    """What `rank` puts in; where every destination gets something of its own, what it puts in
    for rank `to`."""
    if call.raw:
        make = bits
    elif call.noisy:
        make = _NOISY_MAKERS.get(call.reduce_op, noise)
    else:
        make = _MAKERS.get(call.reduce_op, sample)
    return make(call.block_shape(rank, to), call.dtype, rank, call.salt + 17 * to)


def before(call: Call, rank: int, world_size: int) -> Buffers:
    """The tensors with which `rank` makes the call."""
    everyone = range(world_size)
    own = contribution(call, rank)
    outputs = tuple(blank(call.shape, call.dtype) for _ in everyone)
    match call.op:
        case "all_reduce" | "reduce" | "broadcast":
            return Buffers((), (own,))
        case "all_gather":
            return Buffers((own,), outputs)
        case "all_gather_into_tensor":
            return Buffers((own,), (_joined(call, outputs),))
        case "gather":
            return Buffers((own,), outputs if rank == call.root else ())
        case "scatter":
            blocks = _blocks_of(call, rank, world_size)
            return Buffers(blocks if rank == call.root else (), outputs[:1])
        case "reduce_scatter":
            return Buffers(_blocks_of(call, rank, world_size), outputs[:1])
        case "reduce_scatter_tensor":
            return Buffers((_joined(call, _blocks_of(call, rank, world_size)),), outputs[:1])
    received = tuple(blank(call.block_shape(source, rank), call.dtype) for source in everyone)
    sent = _blocks_of(call, rank, world_size)
    if call.op == "all_to_all":
        return Buffers(sent, received)
    assert call.op == "all_to_all_single", call.op
    return Buffers((_joined(call, sent),), (_joined(call, received),))


def after(call: Call, rank: int, world_size: int) -> Buffers:
    """The same tensors when the call is done; what is given has not changed."""
    given = before(call, rank, world_size).given
    return Buffers(given, _outputs(call, rank, world_size))


def rounded_after(call: Call, rank: int, world_size: int) -> Near:
    """What a reducing call leaves in the one tensor that `rank` takes, if it receives anything; of
    complex tensors, as real ones with a dimension more."""
    scatters = call.op in ("reduce_scatter", "reduce_scatter_tensor")
    to = rank if scatters else 0
    return rounded(call.reduce_op, [contribution(call, s, to) for s in range(world_size)])


def receives(call: Call, rank: int) -> bool:
    """Whether the call says anything of what it leaves in this rank's taken tensors."""
    return call.op != "reduce" or rank == call.root


def _outputs(call: Call, rank: int, world_size: int) -> tuple[Tensor, ...]:
    everyone = [contribution(call, source) for source in range(world_size)]
    for_me = [contribution(call, source, rank) for source in range(world_size)]
    match call.op:
        case "all_reduce":
            return (reduced(call.reduce_op, everyone),)
        case "reduce":
            at_root = rank == call.root
            return (reduced(call.reduce_op, everyone) if at_root else everyone[rank],)
        case "broadcast":
            return (everyone[call.root],)
        case "all_gather":
            return tuple(everyone)
        case "all_gather_into_tensor":
            return (_joined(call, everyone),)
        case "gather":
            return tuple(everyone) if rank == call.root else ()
        case "scatter":
            return (for_me[call.root],)
        case "reduce_scatter" | "reduce_scatter_tensor":
            return (reduced(call.reduce_op, for_me),)
        case "all_to_all":
            return tuple(for_me)
    assert call.op == "all_to_all_single", call.op
    return (_joined(call, for_me),)


def _blocks_of(call: Call, source: int, world_size: int) -> tuple[Tensor, ...]:
    return tuple(contribution(call, source, to) for to in range(world_size))


def _joined(call: Call, blocks: Sequence[Tensor]) -> Tensor:
    return torch.stack(tuple(blocks)) if call.stacked else torch.cat(tuple(blocks))

"""Programs of collectives over several groups, as data, and their expected results on every rank.

[Note: a program]
Every rank has a few registers, tensors of `NUMEL` integers. A program is one list of steps for all
ranks; a rank carries out those whose group it is a member of, in order. A step reads register
`source` and writes register `target` (the same one where the operation works in place); operations
that deal in parts use the first `NUMEL / group size` elements as one part. Integers wrap around, so
there is one right result, whatever the order of a sum. A step that is `deferred` is waited for only
when one of its registers is needed, or at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from conformance.oracle.data import sample
from conformance.oracle.reduction import reduced

NUMEL = 12  # so that groups of 1, 2, 3, 4 and 6 ranks divide it
REGISTERS = 4

IN_PLACE = ("all_reduce", "broadcast", "reduce")
BETWEEN = (
    "all_gather",
    "all_gather_into_tensor",
    "gather",
    "scatter",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "all_to_all",
    "all_to_all_single",
)
REDUCING = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor")

Registers = list[Tensor]


@dataclass(frozen=True, slots=True)
class Step:
    """One collective of a program.

    group: index into the program's groups.
    root: as a rank of the group; modulo its size.
    splits: rows that group rank 0 sends to each rank of the group for all_to_all_single; the other
        ranks' are the same, rotated. () is an even split.
    """

    op: str
    group: int = 0
    source: int = 0
    target: int = 0
    reduce_op: str = "sum"
    root: int = 0
    splits: tuple[int, ...] = ()
    deferred: bool = False

    def sent(self, rank: int, size: int) -> list[int]:
        """Rows that this rank of the group sends to each."""
        if not self.splits:
            return [NUMEL // size] * size
        return [self.splits[(to - rank) % size] for to in range(size)]

    def received(self, rank: int, size: int) -> list[int]:
        """Rows that this rank of the group gets from each."""
        return [self.sent(source, size)[rank] for source in range(size)]


@dataclass(frozen=True, slots=True)
class Program:
    """groups: members of each group, ascending; the first one is the world."""

    groups: tuple[tuple[int, ...], ...]
    steps: tuple[Step, ...]

    @property
    def world_size(self) -> int:
        return len(self.groups[0])


def initial(rank: int) -> Registers:
    """What a rank's registers hold at first."""
    return [sample((NUMEL,), "int64", rank, salt=10 * i) for i in range(REGISTERS)]


def run_alone(program: Program) -> list[Registers]:
    """Every rank's registers at the end."""
    state = [initial(rank) for rank in range(program.world_size)]
    for step in program.steps:
        members = program.groups[step.group]
        if step.op != "barrier":
            _carry_out(step, [state[rank] for rank in members])
    return state


def _carry_out(step: Step, state: Sequence[Registers]) -> None:
    """One step, on the registers of the group's members."""
    size = len(state)
    part = NUMEL // size
    root = step.root % size
    inputs = [registers[step.source].clone() for registers in state]
    cut = [x.split(part) for x in inputs]
    for rank, registers in enumerate(state):
        target = registers[step.target]
        match step.op:
            case "all_reduce":
                target.copy_(reduced(step.reduce_op, inputs))
            case "broadcast":
                target.copy_(inputs[root])
            case "reduce" if rank == root:
                target.copy_(reduced(step.reduce_op, inputs))
            case "all_gather" | "all_gather_into_tensor":
                target.copy_(torch.cat([parts[0] for parts in cut]))
            case "gather" if rank == root:
                target.copy_(torch.cat([parts[0] for parts in cut]))
            case "scatter":
                target[:part] = cut[root][rank]
            case "reduce_scatter" | "reduce_scatter_tensor":
                target[:part] = reduced(step.reduce_op, [parts[rank] for parts in cut])
            case "all_to_all":
                target.copy_(torch.cat([parts[rank] for parts in cut]))
            case "all_to_all_single":
                blocks = [
                    torch.split(x, step.sent(source, size))[rank] for source, x in enumerate(inputs)
                ]
                target.copy_(torch.cat(blocks))

"""Records the collectives that FSDP issues, in whatever form they are called."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from conformance import Me
from conformance.harness.traces import Issued, record
from conformance.spec.fsdp.training_runs import Recipe

# On CPU torch gathers into a list of tensors, which is the same exchange.
_SAME = {"all_gather_into_tensor": "all_gather", "reduce_scatter_tensor": "reduce_scatter"}


@dataclass(frozen=True, slots=True)
class Exchange:
    """One collective: what it is, the dtype, and how many elements each rank's part has."""

    kind: str
    dtype: str
    numel: int

    def __str__(self) -> str:
        return f"{self.kind} {self.dtype}[{self.numel}]"


def exchanges(trace: Sequence[Issued], world_size: int) -> list[Exchange]:
    """A trace of a group of so many ranks."""
    found = []
    for issued in trace:
        kind = _SAME.get(issued.operation, issued.operation)
        parts = world_size + 1 if kind in ("all_gather", "reduce_scatter") else 1
        dtype = issued.tensors[0][0] if issued.tensors else ""
        found.append(Exchange(kind, dtype, issued.numel // parts))
    return found


def of_kind(trace: Sequence[Exchange], kind: str) -> list[int]:
    """Elements of the exchanges of one kind, in their order."""
    return [exchange.numel for exchange in trace if exchange.kind == kind]


def trace_of_a_step(
    me: Me, recipe: Recipe, unsynchronized: int = 0
) -> tuple[list[Exchange], list[Exchange], list[Exchange]]:
    """What construction issues, a forward, and a backward; some are not synchronized before."""
    group = record()
    model = recipe.wrapped(me, process_group=group)
    built = group.take()
    for number in range(unsynchronized):
        with model.no_sync():
            loss = recipe.net.loss(model, me.rank, number, me.device)
            built += group.take()
            loss.backward()
    quiet = group.take() if unsynchronized else built
    loss = recipe.net.loss(model, me.rank, 7, me.device)
    forward = exchanges(group.take(), me.world_size)
    loss.backward()
    return exchanges(quiet, me.world_size), forward, exchanges(group.take(), me.world_size)

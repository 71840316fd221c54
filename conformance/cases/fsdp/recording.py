"""Collectives of FSDP as a recorded group sees them, whatever form they are called in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from conformance.harness.traces import Issued

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

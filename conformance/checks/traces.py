"""Compares two traces of collectives: where they first differ. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from conformance.checks.ranks import CheckFailed

_CONTEXT = 3


def assert_same_trace(got: Sequence[object], want: Sequence[object], what: str = "") -> None:
    """Both traces are equal, element by element. Raises CheckFailed that shows where they part."""
    for at, (mine, theirs) in enumerate(zip(got, want, strict=False)):
        if mine != theirs:
            raise CheckFailed(_parting(got, want, at, what))
    if len(got) != len(want):
        raise CheckFailed(_parting(got, want, min(len(got), len(want)), what))


def _parting(got: Sequence[object], want: Sequence[object], at: int, what: str) -> str:
    lines = [f"{what + ': ' if what else ''}the traces part at operation {at}"]
    lines += [f"  both  {same}" for same in got[max(0, at - _CONTEXT) : at]]
    lines += [
        f"  {name:<5} {trace[at] if at < len(trace) else '(nothing more)'}"
        for name, trace in (("got", got), ("want", want))
    ]
    lines.append(f"  of {len(got)} (got) and {len(want)} (want) operations")
    return "\n".join(lines)

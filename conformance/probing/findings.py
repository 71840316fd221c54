"""`Probe`, a call with expected results, and what its outcomes say of a capability. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from conformance.harness.outcome import (
    Died,
    NotTold,
    Outcome,
    Raised,
    Returned,
    StillRunning,
    describe_hang,
)

_WIDTH = 160
_ADDRESS = re.compile(r" at 0x[0-9a-f]+\b")


class Seen(Enum):
    """What a probe came to."""

    WORKS = "works"
    REFUSED = "refused"  # a rank raised
    LACKING = "lacking"  # the ranks returned, but not what the capability means
    HANGS = "hangs"
    DIED = "died"
    WRONG = "wrong data"
    NOT_TRIED = "not tried"


@dataclass(frozen=True, slots=True)
class Finding:
    """What was seen of a capability; says is one line that gives the reason."""

    seen: Seen
    says: str = ""

    @property
    def works(self) -> bool:
        return self.seen is Seen.WORKS


WORKS = Finding(Seen.WORKS)


@dataclass(frozen=True, slots=True)
class Probe:
    """One call on every rank.

    function: called as `function(me, *args)`.
    want: what it returns on each rank: tensors, lists of them, or plain values.
    otherwise: what it means if a rank returns something else; "" if that is wrong data.
    alone: whether no other probe may have used the group, nor may use it afterwards.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    want: tuple[Any, ...]
    otherwise: str = ""
    alone: bool = False


def judge(probe: Probe, outcomes: Sequence[Outcome]) -> Finding:
    """What became of the ranks, as a finding. The worst decides, but a rank that raised explains
    why another one waits."""
    ranks = list(enumerate(outcomes))
    for kind, seen in ((NotTold, Seen.NOT_TRIED), (Died, Seen.DIED), (Raised, Seen.REFUSED)):
        such = [(rank, outcome) for rank, outcome in ranks if isinstance(outcome, kind)]
        if such:
            return Finding(seen, _line(_told(such, of=len(ranks))))
    if any(isinstance(outcome, StillRunning) for outcome in outcomes):
        return Finding(Seen.HANGS, _line(f"hangs: {describe_hang(outcomes)}"))
    got = [outcome.value for outcome in outcomes if isinstance(outcome, Returned)]
    return _compared(probe, got)


def _told(such: Sequence[tuple[int, Outcome]], of: int) -> str:
    rank, outcome = such[0]
    who = "every rank" if len(such) == of else f"rank {rank}"
    hint = outcome.hint if isinstance(outcome, Raised) else ""
    return hint or _ADDRESS.sub("", f"{who} {outcome}")


def _compared(probe: Probe, got: Sequence[Any]) -> Finding:
    for rank, (one, want) in enumerate(zip(got, probe.want, strict=True)):
        if _plain(one) != _plain(want):
            if probe.otherwise:
                return Finding(Seen.LACKING, probe.otherwise)
            says = f"rank {rank} got {_shown(one)}, not {_shown(want)}"
            return Finding(Seen.WRONG, _line(says))
    return WORKS


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return str(value.dtype), list(value.shape), _numbers(value)
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value


def _shown(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(_shown, value)) or "nothing"
    return str(_numbers(value) if isinstance(value, Tensor) else value)


def _numbers(x: Tensor) -> Any:
    """Not every dtype can be compared as it is."""
    return x.to(torch.complex128 if x.is_complex() else torch.float64).tolist()


def _line(text: str) -> str:
    """The first line, without what a comment in TOML cannot hold, and not too long."""
    first = (text.splitlines() or [""])[0]
    printable = "".join(c if c.isprintable() else " " for c in first)
    return printable if len(printable) <= _WIDTH else f"{printable[: _WIDTH - 4]} ..."

"""Outcomes of ranks (returned, raised, died, still running), their verdict, and text for hangs."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from conformance.verdict import Verdict, worst


class Lacking(Exception):
    """A case needs something of torch's that the target, or its device, does not have."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """What a rank did not get done; false if there was nothing.

    said: "send raised ValueError: no", if an operation of `torch.distributed` raised, or "".
    needs: the capabilities that this operation asks for, such as ("dtype:int64", "op:send"); if
        none raised, and the function did, those of all its operations.
    """

    said: str = ""
    needs: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.said)

    def __str__(self) -> str:
        return self.said


NOTHING_REFUSED = Refusal()


@dataclass(frozen=True, slots=True)
class Returned:
    """The rank's function came back with a value.

    refused: the first operation of `torch.distributed` that raised, though the function went on.
    """

    value: Any
    refused: Refusal = NOTHING_REFUSED
    verdict = Verdict.HOLDS

    def __str__(self) -> str:
        return "returned"


# How `pytest.raises(match=...)` begins; only what follows says which words came.
_OTHER_WORDS = "Regex pattern did not match."


@dataclass(frozen=True, slots=True)
class Raised:
    """The rank's function raised.

    type_name: qualified name of the exception's type, "builtins.ValueError" written "ValueError".
    bases: names of all its types, most derived first, so that a case can ask `is_a("RuntimeError")`
        of exceptions whose class exists in the rank alone.
    refused: as of `Returned`.
    hint: what is missing in the target, where the message does not say so; or "".
    """

    type_name: str
    message: str
    traceback: str
    bases: tuple[str, ...] = ()
    refused: Refusal = NOTHING_REFUSED
    hint: str = ""
    verdict = Verdict.BROKEN

    def is_a(self, exception: type[BaseException]) -> bool:
        """Whether the exception was an instance of this type."""
        return type_name(exception) in self.bases

    def __str__(self) -> str:
        first, *rest = self.message.splitlines() or [""]
        if first == _OTHER_WORDS:
            first, rest = " ".join([first, *map(str.strip, rest)]), []
        hint = f" ({self.hint})" if self.hint else ""
        return f"raised {self.type_name}: {first}{' ...' if rest else ''}{hint}"


@dataclass(frozen=True, slots=True)
class Died:
    """The rank's process ended, in whatever way, while its function ran.

    exit_code: as `multiprocessing` has it, negative for a signal.
    stacks: Python stacks of all its threads when a signal such as SIGSEGV ended it, else "".
    last_collective, in_it: as of `StillRunning`.
    """

    exit_code: int
    stacks: str = ""
    last_collective: str = ""
    in_it: bool = False
    verdict = Verdict.CRASHED

    def __str__(self) -> str:
        where = ""
        if self.last_collective:
            where = f" {'in' if self.in_it else 'after'} {self.last_collective}"
        return f"died: {_end_of_process(self.exit_code)}{where}"


@dataclass(frozen=True, slots=True)
class StillRunning:
    """The rank's function had not come back when the parent stopped waiting.

    stacks: Python stacks of all its threads, innermost call first.
    last_collective: "all_reduce #3 on group '0', float32 (5,)", or "" if it issued none.
    in_it: whether that collective had not returned.
    after_failure: another rank had failed already, and this one was given a short grace only; it
        may well be waiting for that other rank, so it is a consequence and decides nothing.
    """

    stacks: str
    last_collective: str
    in_it: bool
    after_failure: bool = False

    @property
    def verdict(self) -> Verdict:
        """A consequence of another rank's failure decides nothing."""
        return Verdict.HOLDS if self.after_failure else Verdict.TIMEOUT

    def __str__(self) -> str:
        where = self.last_collective or "no collective yet"
        state = "waiting in" if self.in_it else "after"
        suffix = " when another rank had failed" if self.after_failure else " at the deadline"
        return f"{state} {where}{suffix}"


@dataclass(frozen=True, slots=True)
class NotTold:
    """The function did not reach the rank, or its value did not come back; nobody knows how the
    target behaved."""

    message: str
    verdict = Verdict.UNKNOWN

    def __str__(self) -> str:
        return f"harness fault: {self.message}"


@dataclass(frozen=True, slots=True)
class NotAsked:
    """Nothing was asked of the rank: it was killed on purpose, for example. It decides nothing.

    outcome: what became of it.
    """

    outcome: Outcome
    verdict = Verdict.HOLDS

    def __str__(self) -> str:
        return f"{self.outcome} (nothing was asked of it)"


Outcome = Returned | Raised | Died | StillRunning | NotTold | NotAsked


def _end_of_process(exit_code: int) -> str:
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return signal.Signals(-exit_code).name
    except ValueError:
        return f"signal {-exit_code}"


def type_name(kind: type) -> str:
    """The name by which a reader knows a type: without "builtins."."""
    if kind.__module__ == "builtins":
        return kind.__qualname__
    return f"{kind.__module__}.{kind.__qualname__}"


def message_of(error: BaseException) -> str:
    """What the exception says, as Python has it where the exception's own code fails."""
    try:
        return "".join((str(error), ""))  # a plain one, should it be of a class of the case's own
    except KeyboardInterrupt:
        raise
    except BaseException:
        return "<exception str() failed>"


def verdict_of(outcomes: Sequence[Outcome]) -> Verdict:
    """The worst outcome decides; all are printed."""
    return worst(o.verdict for o in outcomes)


def describe_hang(outcomes: Sequence[Outcome]) -> str:
    """One sentence that names the ranks that differ, or "" if no rank was left waiting."""
    waiting = {r: o for r, o in enumerate(outcomes) if isinstance(o, StillRunning)}
    if not waiting:
        return ""
    groups: dict[str, list[int]] = {}
    for rank, outcome in waiting.items():
        groups.setdefault(_position(outcome), []).append(rank)
    for rank, other in enumerate(outcomes):
        if rank not in waiting:
            other = other.outcome if isinstance(other, NotAsked) else other
            groups.setdefault(_ENDED.get(type(other), "ran on"), []).append(rank)
    if len(groups) == 1:
        return f"All ranks {next(iter(groups))}."
    parts = [f"{named(ranks)} {what}" for what, ranks in groups.items()]
    return "; ".join(parts) + "."


_ENDED: dict[type, str] = {
    Returned: "had returned",
    Raised: "had raised",
    Died: "had died",
    NotTold: "could not be asked",
}


def _position(outcome: StillRunning) -> str:
    if not outcome.last_collective:
        return "never issued a collective"
    if outcome.in_it:
        return f"waited in {outcome.last_collective}"
    return f"went on after {outcome.last_collective} and did not return"


def named(ranks: Sequence[int]) -> str:
    """ "rank 0", "ranks 0, 1 and 3"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"

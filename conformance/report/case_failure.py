"""A failed case's record in the certificate: cause, bounded texts and commands, as plain data."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from conformance.checks import CheckFailed
from conformance.harness.outcome import message_of
from conformance.report.plain import plain
from conformance.verdict import Verdict

if TYPE_CHECKING:
    from conformance.report.failure import FailedCase

TEXT_CHARS = 8000
REPEATED_TEXT_CHARS = 1000
FULL_OF_A_CAUSE = 3
_CAUSE_CHARS = 300
_EXAMPLE_CHARS = 2000
_TAIL_SHARE = 0.3  # a traceback's end says more than its middle, and `again` comes last


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a case failed, and how to see it again.

    text: the whole report, as the terminal shows it, at most TEXT_CHARS characters.
    again: words of the command that runs this case again.
    script: path of the stand-alone script, relative to the certificate's folder; "" for none.
    cause: equal for cases that fail in the same way.
    wrong_ranks: ranks that raised, died, hung or returned a wrong value, as far as known.
    example: what Hypothesis drew, or "".
    """

    text: str
    again: tuple[str, ...] = ()
    script: str = ""
    cause: str = ""
    wrong_ranks: tuple[int, ...] = ()
    example: str = ""

    def to_plain(self) -> dict[str, Any]:
        """As dicts, lists, strings and numbers."""
        plain = asdict(self)
        return {**plain, "again": list(self.again), "wrong_ranks": list(self.wrong_ranks)}

    @staticmethod
    def from_plain(plain: Mapping[str, Any]) -> Failure:
        """The inverse of `to_plain`."""
        again, wrong_ranks = tuple(plain["again"]), tuple(plain["wrong_ranks"])
        return Failure(**{**plain, "again": again, "wrong_ranks": wrong_ranks})


def failure_of(case: FailedCase, cause: str, text: str, folder_of_scripts: str) -> Failure:
    """The failure of a case whose whole report is `text`.

    folder_of_scripts: name of the scripts' folder in that of the certificate.
    """
    found = re.search(rf"{re.escape(folder_of_scripts)}/[^/\s,]+\.py", case.script)
    notes = (str(note) for note in getattr(case.error, "__notes__", ()))
    examples = (note for note in notes if note.startswith(_DRAWN))
    return Failure(
        text=bounded(text, TEXT_CHARS),
        again=tuple(case.command),
        script=found[0] if found else "",
        cause=cause,
        wrong_ranks=tuple(_wrong_ranks(case.error)),
        example=bounded(plain("\n".join(examples)), _EXAMPLE_CHARS),
    )


_DRAWN = ("Falsifying example", "Falsifying explicit example")


_AND_SO = re.compile(r", and so (is|are) ranks? [\d, ]+( and \d+ more)?$")
# What follows the name of an operation in what a rank waited in or died in: "all_reduce #3 on ...".
_COLLECTIVE = re.compile(r" #\d+ on group '[^']*'(, (\[\d+ x )?\w+ \([\d, ]*\)\]?)*")
_SAYS_LITTLE = " wrong"
# How a drawn call is written: of all that it says, the operation and the reduction are the cause.
_CALL = re.compile(r"Call\(op='(\w+)'.*?reduce_op='(\w+)'.*?(?:\): |$)")


def cause_of(error: BaseException, requirement: str) -> str:
    """The exception's type and the first line of its message, with numbers and addresses as N.

    requirement: the id of one that is broken: where the message only says that something is wrong,
        its chapter is part of the cause.
    """
    brief = getattr(error, "brief", "")  # of RanksFailed: the worst that became of a rank
    message = brief or next(iter(message_of(error).splitlines()), "")
    text = message if brief else f"{type(error).__name__}: {message}"
    text = _AND_SO.sub("", text)
    text = _CALL.sub(r"\1 with \2", text)
    text = _COLLECTIVE.sub("", text)
    text = re.sub(r"0x[0-9a-fA-F]+|\d+(\.\d+)?", "N", text)
    text = bounded(plain(re.sub(r"^rank N ", "", text)), _CAUSE_CHARS)
    return f"{text} ({requirement.partition('/')[0]})" if text.endswith(_SAYS_LITTLE) else text


def _wrong_ranks(error: BaseException) -> Iterator[int]:
    if isinstance(error, CheckFailed):
        yield from error.ranks
    for rank, outcome in enumerate(getattr(error, "outcomes", ())):
        if outcome.verdict is not Verdict.HOLDS:
            yield rank


def bounded(text: str, chars_max: int) -> str:
    """The beginning and the end of a text that is too long."""
    if len(text) <= chars_max:
        return text
    tail = int(chars_max * _TAIL_SHARE)
    head = chars_max - tail - 60  # room for the line between
    left_out = len(text) - head - tail
    return f"{text[:head]}\n... ({left_out} characters left out) ...\n{text[-tail:]}"


def rows_of_failures(failures: Iterable[tuple[str, Failure]]) -> list[dict[str, Any]]:
    """Case and failure as rows of a certificate: of each cause, only the first have whole texts."""
    rows = []
    seen: dict[str, int] = {}
    for case, failure in dict.fromkeys(failures):
        seen[failure.cause] = seen.get(failure.cause, 0) + 1
        if seen[failure.cause] > FULL_OF_A_CAUSE:
            failure = replace(failure, text=bounded(failure.text, REPEATED_TEXT_CHARS))
        rows.append({"case": case, **failure.to_plain()})
    return rows

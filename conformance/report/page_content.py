"""Contents of the HTML report: failures by cause, cases that hold, requirements by reason. Pure."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from conformance.verdict import FAILURES, Verdict

Document = Mapping[str, Any]

_SCRIPTS = "alone/"  # the folder of scripts beside the page
_SHOWN_BAD = {str(verdict) for verdict in FAILURES | {Verdict.UNKNOWN}}


@dataclass(frozen=True, slots=True)
class ShownFailure:
    """One failed case with all that its block shows.

    anchor: the id of its block.
    requirements: the rows of the requirements that it breaks; at least one.
    parameters: those of the case's name, the world size left out.
    again: a command line, or "".
    script: a link relative to the page, or "".
    """

    anchor: str
    case: str
    verdict: str
    world_size: int | None
    parameters: str
    requirements: tuple[Document, ...]
    wrong_ranks: tuple[int, ...]
    example: str
    text: str
    again: str
    script: str


@dataclass(frozen=True, slots=True)
class Cause:
    """Cases that fail in the same way."""

    text: str
    failures: tuple[ShownFailure, ...]

    @property
    def requirements(self) -> int:
        """How many requirements they break."""
        return len({row["id"] for failure in self.failures for row in failure.requirements})


@dataclass(frozen=True, slots=True)
class HeldCases:
    """Runs of one test that all hold, of which a line is enough."""

    test: str
    parameters: tuple[str, ...]
    seconds: float


def causes_of(document: Document) -> list[Cause]:
    """Failures by cause, that of the most requirements first."""
    rows: dict[str, list[tuple[Document, Document]]] = {}
    for row in document["requirements"]:
        for case in row["cases"]:
            if case["verdict"] in _SHOWN_BAD:
                rows.setdefault(case["case"], []).append((row, case))
    found: dict[str, list[ShownFailure]] = {}
    # Certificates of earlier versions say less.
    for number, failure in enumerate(document.get("failures", ())):
        of_case = rows.get(failure["case"])
        if of_case:
            shown = _shown_failure(number, failure, of_case)
            found.setdefault(failure["cause"], []).append(shown)
    causes = [Cause(text, tuple(failures)) for text, failures in found.items()]
    return sorted(causes, key=lambda cause: (-cause.requirements, -len(cause.failures)))


def _shown_failure(
    number: int, failure: Document, of_case: Sequence[tuple[Document, Document]]
) -> ShownFailure:
    _, case = of_case[0]
    script = failure["script"]
    return ShownFailure(
        anchor=f"failure-{number}",
        case=failure["case"],
        verdict=case["verdict"],
        world_size=case["world_size"],
        parameters=re.sub(r"^ws\d+-?", "", _test_and_parameters(failure["case"])[1]),
        requirements=tuple({row["id"]: row for row, _ in of_case}.values()),
        wrong_ranks=tuple(failure["wrong_ranks"]),
        example=failure["example"],
        text=failure["text"],
        again=shlex.join(failure["again"]),
        script=script if script.startswith(_SCRIPTS) else "",
    )


def held_cases(cases: Iterable[Document]) -> list[HeldCases]:
    """The cases that hold and have nothing to say, by test."""
    found: dict[str, list[Document]] = {}
    for case in cases:
        if is_plain_success(case):
            found.setdefault(_test_and_parameters(case["case"])[0], []).append(case)
    return [
        HeldCases(
            test,
            tuple(_test_and_parameters(c["case"])[1] for c in runs),
            sum(c["seconds"] for c in runs),
        )
        for test, runs in found.items()
    ]


def is_plain_success(case: Document) -> bool:
    """Whether it holds without a word of explanation."""
    return case["verdict"] == str(Verdict.HOLDS) and not case["reason"]


def _test_and_parameters(nodeid: str) -> tuple[str, str]:
    """ "test_x.py::test_sum[ws2-float]" -> ("test_x.py::test_sum", "ws2-float")."""
    test, bracket, rest = nodeid.partition("[")
    return test, rest.removesuffix("]") if bracket else ""


def by_reason(document: Document, verdict: str) -> list[tuple[str, list[str]]]:
    """Reason -> ids of the requirements with this verdict, the reason of most of them first."""
    found: dict[str, list[str]] = {}
    for row in document["requirements"]:
        if row["verdict"] == verdict:
            found.setdefault(_why(row), []).append(row["id"])
    return sorted(found.items(), key=lambda entry: (-len(entry[1]), entry[0]))


def _why(row: Document) -> str:
    """What is not claimed is told by the capabilities, which are equal for many requirements."""
    lacks = Counter(name for case in row["cases"] for name in case["lacks"])
    if row["verdict"] == str(Verdict.NOT_CLAIMED) and lacks:
        return f"the target does not claim {', '.join(sorted(lacks))}"
    return str(row["reason"])

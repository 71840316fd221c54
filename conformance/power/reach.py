"""Which cases reach what: marks that ranks set in a file, read after each case of a run."""

from __future__ import annotations

import json
import mmap
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

# The variable of the environment that names the file of marks.
REACHED = "CONFORMANCE_REACHED"


class Marks:
    """A byte for each thing that can be reached, in a file that processes share."""

    def __init__(self, path: str, count: int) -> None:
        self._count = count
        with open(path, "r+b") as file:
            self.memory = mmap.mmap(file.fileno(), count)

    @classmethod
    def made(cls, path: str, count: int) -> Marks:
        """In a new file, with none set."""
        Path(path).write_bytes(bytes(count))
        return cls(path, count)

    def take(self) -> list[int]:
        """The numbers of those that are set, which are set no more."""
        found = [number for number, mark in enumerate(self.memory[:]) if mark]
        self.memory[:] = bytes(self._count)
        return found


@dataclass(frozen=True, slots=True)
class Case:
    """What a case reached on any rank, and how long it took."""

    seconds: float
    reached: frozenset[int]


class NotesReach:
    """A plugin of pytest that notes what each case reaches."""

    def __init__(self, marks: Marks) -> None:
        self._marks = marks
        self.cases: dict[str, Case] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._marks.take()
        began = time.monotonic()
        done = yield
        self.cases[item.nodeid] = Case(time.monotonic() - began, frozenset(self._marks.take()))
        return done


@dataclass(frozen=True, slots=True)
class Reach:
    """What all cases of a run reach.

    of: what was run and is numbered; a reach of something else is of no use.
    """

    of: str
    cases: Mapping[str, Case]

    def reaching(self, numbers: frozenset[int] | None) -> list[str]:
        """The cases that reach one of these, the shortest first; all of them for None."""
        found = [n for n, case in self.cases.items() if numbers is None or case.reached & numbers]
        return sorted(found, key=lambda name: self.cases[name].seconds)

    def write(self, path: Path) -> None:
        cases = {n: [c.seconds, sorted(c.reached)] for n, c in self.cases.items()}
        path.write_text(json.dumps({"of": self.of, "cases": cases}), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Reach:
        """Raises ValueError if it is no such file."""
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            cases = {n: Case(s, frozenset(r)) for n, (s, r) in found["cases"].items()}
            return cls(found["of"], cases)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} does not say what cases reach: {error}") from error

"""Files that pytest-xdist workers and controller share: broken rules, failed groups, the plan."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from conformance.catalogue.rules import catalogue

# Not the name of any requirement.
_USAGE_ERROR = "usage error"
_PLANNED = "planned"
_MADE = "made"
_NOT_MADE = "not made"
_HUNG = "hung"

# A target may fail once by bad luck. Each try may cost a deadline.
_TRIES = 2


@dataclass(frozen=True, slots=True)
class Planned:
    """What a run would have to do to leave nothing out.

    cases: node id -> the requirements that the case covers, of those that run and of those that
        were left out.
    files_left_out: files of the suite of which no case was found.
    unclaimed: rules without a case that could run -> what their cases need and the target does not
        claim.
    """

    cases: Mapping[str, Sequence[str]] = field(default_factory=dict)
    files_left_out: Sequence[str] = ()
    unclaimed: Mapping[str, Sequence[str]] = field(default_factory=dict)


class Board:
    """A folder with one empty file for each requirement that is broken, each in which ranks hung
    and each default group that could not be made, one for a usage error and one for what was
    planned: safe to write to and to read from several processes, and gone at the end of the run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @staticmethod
    def make() -> Board:
        """A board of a name that no other run has."""
        return Board(Path(tempfile.mkdtemp(prefix="conformance-")))

    def note_broken(self, requirement: str, *, hung: bool = False) -> None:
        """Tell every worker that this requirement does not hold, and whether ranks hung."""
        self._note(requirement).touch()
        if hung:
            self._note(f"{_HUNG} {requirement}").touch()

    def has_hung(self, requirement: str) -> bool:
        """Whether ranks hung in a case of it, and again on fresh ranks."""
        return self._note(f"{_HUNG} {requirement}").exists()

    def broken_root(self, requirements: Sequence[str]) -> str:
        """A requirement that does not hold and on which one of these rests, or "".

        Those among them do not count: a case that covers a root itself is there to judge it.
        """
        roots = {root for id in requirements for root in catalogue().roots(id)}
        broken = (root for root in roots.difference(requirements) if self._note(root).exists())
        return min(broken, default="")

    def note_default_group(self, ranks: str, *, was_made: bool) -> None:
        """Tell every worker whether such ranks ("2 ranks on cpu") could make a default group."""
        said = f"{_MADE} {ranks}" if was_made else f"{_NOT_MADE} {ranks} {uuid.uuid4().hex}"
        (self.folder / said).touch()

    def has_no_default_group(self, ranks: str) -> bool:
        """Whether it failed more than once, and never worked: it will not work for others."""
        if (self.folder / f"{_MADE} {ranks}").exists():
            return False
        return len(list(self.folder.glob(f"{_NOT_MADE} {ranks} *"))) >= _TRIES

    def note_usage_error(self, message: str) -> None:
        """Tell the controller that the cases cannot be run as they are written."""
        (self.folder / _USAGE_ERROR).write_text(message)

    def usage_error(self) -> str:
        """What `note_usage_error` was last told, or ""."""
        path = self.folder / _USAGE_ERROR
        return path.read_text() if path.exists() else ""

    def note_planned(self, planned: Planned) -> None:
        """Tell the controller what there was to run; each worker finds the same."""
        written = self.folder / f"{_PLANNED} {os.getpid()}"
        written.write_text(json.dumps(asdict(planned)))
        written.replace(self.folder / _PLANNED)

    def planned(self) -> Planned:
        """What `note_planned` was told; nothing where no worker came so far."""
        path = self.folder / _PLANNED
        return Planned(**json.loads(path.read_text())) if path.exists() else Planned()

    def remove(self) -> None:
        """End the board; workers that are still at it find it empty."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _note(self, requirement: str) -> Path:
        return self.folder / requirement.replace("/", "~")

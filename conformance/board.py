"""What the pytest workers of one run tell each other and the controller."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from conformance.requirements import catalogue

_USAGE_ERROR = "usage error"  # not the name of any requirement


class Board:
    """A folder with one empty file for each broken requirement, and one for a usage error: safe to
    write to and to read from several processes, and gone at the end of the run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @staticmethod
    def make() -> Board:
        """A board of a name that no other run has."""
        return Board(Path(tempfile.mkdtemp(prefix="conformance-")))

    def note_broken(self, requirement: str) -> None:
        """Tell every worker that this requirement does not hold."""
        self._note(requirement).touch()

    def broken_root(self, requirements: Sequence[str]) -> str:
        """A requirement that does not hold and on which one of these rests, or "".

        Those among them do not count: a case that covers a root itself is there to judge it.
        """
        roots = {root for id in requirements for root in catalogue().roots(id)}
        broken = (root for root in roots.difference(requirements) if self._note(root).exists())
        return min(broken, default="")

    def note_usage_error(self, message: str) -> None:
        """Tell the controller that the cases cannot be run as they are written."""
        (self.folder / _USAGE_ERROR).write_text(message)

    def usage_error(self) -> str:
        """What `note_usage_error` was last told, or ""."""
        path = self.folder / _USAGE_ERROR
        return path.read_text() if path.exists() else ""

    def remove(self) -> None:
        """End the board; workers that are still at it find it empty."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _note(self, requirement: str) -> Path:
        return self.folder / requirement.replace("/", "~")

"""Writes the site into a folder: all of it appears, or what was there stays."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

# Is in every folder that was written here, so that no other one is replaced.
_MARK = ".observatory"


class NotASite(Exception):
    """The folder holds something else; the message is one line for the user."""


@dataclass(frozen=True, slots=True)
class Built:
    """How much was written."""

    files: int
    bytes: int


def write_site(folder: Path, pages: Iterable[tuple[str, str]]) -> Built:
    """Write pages, (path in the site, text), in the place of what an earlier call wrote there.

    Raises NotASite if the folder holds something else, and OSError if it cannot be written to.
    """
    if folder.exists() and any(folder.iterdir()) and not (folder / _MARK).exists():
        raise NotASite(f"{folder} is not empty, and not a site that was built before")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as aside:
        new = Path(aside) / "new"
        built = _write(new, pages)
        if folder.exists():
            folder.rename(Path(aside) / "old")
        new.rename(folder)
    return built


def _write(folder: Path, pages: Iterable[tuple[str, str]]) -> Built:
    files = size = 0
    folder.mkdir()
    (folder / _MARK).touch()
    for name, text in pages:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        data = text.encode("utf-8", errors="replace")
        path.write_bytes(data)
        files, size = files + 1, size + len(data)
    return Built(files, size)

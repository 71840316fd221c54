"""A certificate's folder: locking, moving results in place at the end of a run, finding the newest.

    DIR/                certificate.json, report.html, junit.xml, alone/ of the last whole run
    DIR/partial/        the same of the last selection
    DIR/interrupted/    the same of the last run that did not end
    DIR/.new/           what the run that holds the lock has written so far
    DIR/.lock           locked by that run; the kernel lets go of it however the run ends

Nothing is deleted by a run that did not produce its successor.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from conformance.report.certificate import ALONE, CERTIFICATE, JUNIT, REPORT

PARTIAL = "partial"
INTERRUPTED = "interrupted"
_NEW = ".new"
_OLD = ".old"
_LOCK = ".lock"

# The certificate comes last: where it is, the rest of the same run is too.
_RESULTS = (ALONE, JUNIT, REPORT, CERTIFICATE)


class FolderInUse(Exception):
    """The folder cannot be used; the message is one line for the user."""


def aside(folder: Path) -> Path:
    """Where a run that was told to write to this folder writes until its end."""
    return folder / _NEW


class CertificateFolder:
    """Holds the lock of a folder for as long as the process lives.

    Raises FolderInUse if another run holds it, or if the folder is of another target.
    Raises OSError if it cannot be written to.
    """

    def __init__(self, folder: Path, target: str, *, replace_other: bool = False) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._lock, 32, 0).decode(errors="replace").strip()
            os.close(self._lock)
            raise FolderInUse(f"process {holder or '?'} is writing a certificate there") from None
        others = sorted({name for name in _targets_in(folder) if name != target})
        if others and not replace_other:
            os.close(self._lock)
            raise FolderInUse(
                f"it holds the certificate of {', '.join(others)}; choose another folder, or say "
                "--replace-other-target"
            )
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)
        shutil.rmtree(aside(folder), ignore_errors=True)  # of a run that was killed
        aside(folder).mkdir()

    def settle(self, *, whole: bool, interrupted: bool) -> Path:
        """Move what was written aside in place; the folder that it is in now.

        What is replaced goes only when its successor is there.
        """
        name = INTERRUPTED if interrupted else "" if whole else PARTIAL
        place = self._folder / name
        place.mkdir(exist_ok=True)
        old = place / _OLD
        shutil.rmtree(old, ignore_errors=True)
        old.mkdir()
        for result in reversed(_RESULTS):
            with contextlib.suppress(FileNotFoundError):
                os.rename(place / result, old / result)
        for result in _RESULTS:
            with contextlib.suppress(FileNotFoundError):
                os.rename(aside(self._folder) / result, place / result)
        shutil.rmtree(old, ignore_errors=True)
        return place

    def is_aside(self, path: str) -> bool:
        """Whether this is a file that the run writes aside."""
        return Path(path).is_relative_to(aside(self._folder).absolute())

    def close(self) -> None:
        """Drop what was written aside and was not moved, and let others write here."""
        shutil.rmtree(aside(self._folder), ignore_errors=True)
        os.close(self._lock)


def newest_in(folder: Path) -> Path:
    """The folder that `verify` and `compare` look into: of the whole run, else of a selection, else
    of a run that did not end."""
    for place in (folder, folder / PARTIAL, folder / INTERRUPTED):
        if (place / CERTIFICATE).exists():
            return place
    return folder


def _targets_in(folder: Path) -> Iterator[str]:
    for place in (folder, folder / PARTIAL, folder / INTERRUPTED):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            document = json.loads((place / CERTIFICATE).read_text(encoding="utf-8"))
            yield str(document["target"]["name"])

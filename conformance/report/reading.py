"""Reading a certificate back from a file, or from the folder that `--certificate` named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from conformance.report.certificate import CERTIFICATE
from conformance.report.folder import newest_in


class Unreadable(Exception):
    """There is a file, and it is not a certificate; the message says why."""


def certificate_file(place: Path) -> Path:
    """The certificate's file. Raises OSError when there is none."""
    path = newest_in(place) / CERTIFICATE if place.is_dir() else place
    path.stat()
    return path


def _refuse(constant: str) -> None:
    """Nothing is written that is no number, and it would be neither more nor less than another."""
    raise ValueError(f"{constant} is no number")


def read_certificate(path: Path) -> dict[str, Any]:
    """The document. Raises OSError, or Unreadable for a file that is cut or something else."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse)
    except ValueError as error:  # not JSON, or not text at all
        raise Unreadable(f"not JSON, or only a part of it: {error}") from error
    except RecursionError:
        raise Unreadable("JSON, but no certificate: it is nested too deeply") from None
    if not isinstance(document, dict):
        raise Unreadable("JSON, but no certificate")
    return document

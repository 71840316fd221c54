"""Reading a certificate back from a file, or from the folder that `--certificate` named."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from conformance.report.certificate import CERTIFICATE, digest_of, digest_of_rows
from conformance.report.folder import newest_in
from conformance.rule import FORMER_NAMES

_OF_RULES = "requirements_digest"


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
    return _in_todays_names(document)


def _in_todays_names(document: dict[str, Any]) -> dict[str, Any]:
    """The same with profiles by their names of today; its digests are as right as before."""
    changed = {key: _renamed(key, value) for key, value in document.items()}
    if changed == document:
        return document
    with suppress(KeyError, TypeError):  # no certificate, as its reader will say
        if digest_of_rows(document["requirements"]) == document["suite"][_OF_RULES]:
            changed["suite"][_OF_RULES] = digest_of_rows(changed["requirements"])
    is_whole = digest_of(document) == document.get("digest")
    return {**changed, "digest": digest_of(changed)} if is_whole else changed


def _renamed(key: str, value: Any) -> Any:
    """key: under which the value stands, or the list that it stands in."""
    if isinstance(value, dict):
        return {k: _renamed(k, v) for k, v in value.items()}
    if isinstance(value, list):
        return [_renamed(key, v) for v in value]
    if isinstance(value, str) and key in ("profile", "profiles"):
        return FORMER_NAMES.get(value, value)
    if isinstance(value, str) and key == "sentence":  # "conformant: collectives, p2p; 3 of ..."
        return re.sub(r"\w+", lambda word: FORMER_NAMES.get(word[0], word[0]), value)
    return value

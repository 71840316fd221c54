"""Finds certificates in files and folders, and reads them with their "how to reproduce" pages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from packaging.version import InvalidVersion, Version

from conformance.report.certificate import CERTIFICATE, SCHEMA_VERSION, digest_of
from conformance.report.folder import INTERRUPTED
from conformance.report.reading import Unreadable, read_certificate
from conformance.report.schema import load_schema, violations
from conformance.site.model import Report, report_of

REPRODUCE = "REPRODUCE.md"


def certificate_files(places: Iterable[Path]) -> Iterator[Path]:
    """The certificates that are named, and those in the folders that are named, at any depth.

    Left out is what a run has not finished. Raises OSError for a place that is not there.
    """
    for place in places:
        place.stat()
        if not place.is_dir():
            yield place
            continue
        for file in sorted(place.rglob(CERTIFICATE)):
            folders = file.relative_to(place).parts[:-1]
            if INTERRUPTED not in folders and not any(name.startswith(".") for name in folders):
                yield file


def read_report(file: Path) -> Report:
    """The report of a certificate. Raises Unreadable for what the site cannot show.

    That it is whole is seen by its digest and its form; `verify` looks at what it says.
    """
    document = read_certificate(file)
    if document.get("schema_version") != SCHEMA_VERSION:
        raise Unreadable(f"not a certificate of the form {SCHEMA_VERSION}")
    if document.get("digest") != digest_of(document):
        raise Unreadable("its content does not match its digest: it was cut, damaged or edited")
    page = file.with_name(REPRODUCE)
    reproduce = page.read_text(encoding="utf-8", errors="replace") if page.exists() else ""
    try:
        report = report_of(document, reproduce)
        wrong = next(violations(report.document, load_schema()), None)
        Version(report.torch)
    except (KeyError, TypeError, InvalidVersion) as error:
        raise Unreadable(f"it lacks what every certificate has: {error!r}") from error
    if wrong is not None:
        raise Unreadable(wrong)
    return report

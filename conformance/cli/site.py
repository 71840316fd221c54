"""The subcommand `site`: builds the observatory, a static site made of many certificates."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from conformance.catalogue.rules import catalogue
from conformance.report.reading import Unreadable
from conformance.report.terminal import count_of, duration
from conformance.run.settings import UsageError
from conformance.site.build import NotASite, write_site
from conformance.site.entries import entries
from conformance.site.model import Observatory, Report
from conformance.site.pages import Pages
from conformance.site.reading import certificate_files, read_report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `site`."""
    parser.add_argument("folder", metavar="DIR", type=Path, help="where the site is written")
    parser.add_argument(
        "certificates",
        metavar="CERTIFICATE",
        nargs="+",
        type=Path,
        help="certificate.json, or a folder in which all certificates are found at any depth",
    )
    parser.epilog = "Exit code: 0, or 1 if a certificate was left out because it cannot be read."


def run(arguments: argparse.Namespace) -> int:
    """Build the site; the exit code."""
    started = time.monotonic()
    reports, unread = _read(arguments.certificates)
    if not reports:
        raise UsageError("no certificate to show; `certify` makes one")
    observatory = Observatory(reports, catalogue().values())
    pages = Pages(observatory, entries(observatory.requirements))
    try:
        built = write_site(arguments.folder, pages.all())
    except NotASite as error:
        raise UsageError(str(error)) from error
    except OSError as error:
        raise UsageError(f"{arguments.folder}: {error.strerror}") from error
    print(
        f"{arguments.folder / 'index.html'}: {count_of(len(observatory.targets), 'target')}, "
        f"{count_of(len(observatory.versions), 'version')} of torch, "
        f"{count_of(len(observatory.reports), 'certificate')}, "
        f"{count_of(len(observatory.requirements), 'rule')}; {count_of(built.files, 'file')}, "
        f"{built.bytes / 1e6:.1f} MB, {duration(time.monotonic() - started)}"
    )
    return int(unread)


def _read(places: list[Path]) -> tuple[list[Report], bool]:
    """The reports, and whether some could not be read."""
    reports, unread = [], False
    try:
        for file in certificate_files(places):
            try:
                reports.append(read_report(file))
            except Unreadable as error:
                print(f"{file}: left out: {error}", file=sys.stderr)
                unread = True
    except OSError as error:
        raise UsageError(f"{error.filename}: {error.strerror}") from error
    return reports, unread

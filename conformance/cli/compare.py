"""The subcommand `compare`: what changed from one certificate to another."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from conformance.cli.tables import show_json, show_table
from conformance.report.compare import Comparison, Kind, compare
from conformance.report.reading import Unreadable, certificate_file, read_certificate
from conformance.report.schema import load_schema, violations
from conformance.run.settings import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `compare`."""
    parser.add_argument("before", type=Path, help="certificate.json, or the folder it is in")
    parser.add_argument("after", type=Path, help="the newer one")
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.epilog = "Exit code: 0, or 1 if there are regressions."


def run(arguments: argparse.Namespace) -> int:
    """Show the changes; the exit code."""
    comparison = compare(_read(arguments.before), _read(arguments.after))
    if arguments.json:
        show_json(asdict(comparison))
    else:
        _show(comparison)
    return int(comparison.has_regressions)


def _read(place: Path) -> dict[str, Any]:
    try:
        document = read_certificate(certificate_file(place))
    except OSError as error:
        raise UsageError(f"{place}: {error.strerror}") from error
    except Unreadable as error:
        raise UsageError(f"{place}: {error}") from error
    wrong = next(violations(document, load_schema()), None)
    if wrong is not None:
        raise UsageError(f"{place}: not a certificate of this kind: {wrong}")
    return document


def _show(comparison: Comparison) -> None:
    for kind in Kind:
        rows = [
            (change.requirement, change.before or "-", change.after or "-", change.reason)
            for change in comparison.changes
            if change.kind is kind
        ]
        if rows:
            show_table(str(kind), ("requirement", "before", "after", "why"), rows)
    facts = [(name, *pair) for name, pair in comparison.circumstances.items()]
    if facts:
        show_table("circumstances", ("what", "before", "after"), facts)
    if not comparison.changes:
        print("no verdict changed", file=sys.stderr)

"""The subcommand `compare`: shows what changed between two certificates, as tables or Markdown."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from textwrap import shorten
from typing import Any

from conformance.cli.tables import show_json, show_table
from conformance.report.compare import Comparison, Kind, compare
from conformance.report.reading import Unreadable, certificate_file, read_certificate
from conformance.report.schema import load_schema, violations
from conformance.run.settings import UsageError

# Heading, names of the columns, rows.
Table = tuple[str, Sequence[str], Sequence[Sequence[str]]]

# In Markdown: rows of a table, and characters of a cell.
_SHOWN = 30
_WIDTH = 200


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `compare`."""
    parser.add_argument("before", type=Path, help="certificate.json, or the folder it is in")
    parser.add_argument("after", type=Path, help="the newer one")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="as JSON")
    form.add_argument("--markdown", action="store_true", help="as a comment on a pull request")
    parser.epilog = "Exit code: 0, or 1 if there are regressions."


def run(arguments: argparse.Namespace) -> int:
    """Show the changes; the exit code."""
    comparison = compare(_read(arguments.before), _read(arguments.after))
    if arguments.json:
        show_json(asdict(comparison))
    elif arguments.markdown:
        print("\n".join(_markdown(comparison)))
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
    for heading, columns, rows in _tables(comparison):
        show_table(heading, columns, rows)
    if not comparison.changes:
        print("no verdict changed", file=sys.stderr)


def _markdown(comparison: Comparison) -> Iterator[str]:
    """Of each kind of change the first ones: a comment may not be of any length."""
    if not comparison.changes:
        yield "No verdict changed."
    for heading, columns, rows in _tables(comparison):
        yield f"\n**{heading}** ({len(rows)})\n"
        for cells in (columns, ["---"] * len(columns), *rows[:_SHOWN]):
            yield f"| {' | '.join(map(_cell, cells))} |"
        if len(rows) > _SHOWN:
            yield f"\nand {len(rows) - _SHOWN} more"


def _cell(text: str) -> str:
    return shorten(text, _WIDTH, placeholder=" ...").replace("|", "\\|").replace("<", "&lt;")


def _tables(comparison: Comparison) -> Iterator[Table]:
    """The changes by kind, worst first, and what else is different."""
    for kind in Kind:
        rows = [
            (change.requirement, change.before or "-", change.after or "-", change.reason)
            for change in comparison.changes
            if change.kind is kind
        ]
        if rows:
            yield str(kind), ("requirement", "before", "after", "why"), rows
    facts = [(name, *pair) for name, pair in comparison.circumstances.items()]
    if facts:
        yield "circumstances", ("what", "before", "after"), facts

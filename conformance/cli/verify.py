"""The subcommand `verify`: whether a certificate is whole and consistent."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from conformance.report.certificate import JUNIT
from conformance.report.reading import Unreadable, certificate_file, read_certificate
from conformance.report.terminal import count_of
from conformance.report.verify import junit_problems, problems
from conformance.settings import UsageError
from conformance.version import VERSION


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `verify`."""
    parser.add_argument("folder", type=Path, help="what --certificate named")
    parser.epilog = "Exit code: 0, or 1 if something is wrong with the certificate."


def run(arguments: argparse.Namespace) -> int:
    """Check, and say what is wrong; the exit code."""
    try:
        path = certificate_file(arguments.folder)
        document = read_certificate(path)
        found = list(problems(document))
        junit = path.with_name(JUNIT)
        if not found and junit.exists():
            found += junit_problems(document, junit)
    except OSError as error:
        raise UsageError(f"{arguments.folder}: {error.strerror}") from error
    except Unreadable as error:
        document, found = {}, [str(error)]
    for problem in found:
        print(f"{path}: {problem}", file=sys.stderr)
    if found:
        return 1
    suite = document["suite"]["version"]
    if suite != VERSION:
        print(f"made by version {suite} of the suite: its requirements were not compared with mine")
    cases, files = (
        document["run"].get("cases_left_out", 0),
        document["run"].get("files_left_out", ()),
    )
    if cases or files:
        left_out = f"{count_of(cases, 'case')} and {count_of(len(files), 'file')}"
        print(f"of a selection: {left_out} of the suite were left out")
    print(f"{path}: whole and consistent; {document['target']['name']} {document['conclusion']}")
    return 0

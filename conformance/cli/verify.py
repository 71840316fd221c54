"""The subcommand `verify`: checks a certificate, and that required profiles are conformant."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from conformance.report.certificate import JUNIT
from conformance.report.conclusion import Conclusion
from conformance.report.reading import Unreadable, certificate_file, read_certificate
from conformance.report.signature import NoKey, NotSigned, trusted_comment
from conformance.report.terminal import count_of
from conformance.report.verify import junit_problems, problems
from conformance.rule import profiles_named
from conformance.run.settings import UsageError
from conformance.version import VERSION


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `verify`."""
    parser.add_argument("folder", type=Path, help="what --certificate named")
    parser.add_argument(
        "--require",
        metavar="PROFILE,...",
        help="the target must be conformant in each of these profiles, as in --require ddp,fsdp",
    )
    parser.add_argument(
        "--signed-by",
        metavar="KEY",
        help="the certificate must be signed by this public key of minisign: a file, or its line",
    )
    parser.epilog = (
        "Exit code: 0, or 1 if something is wrong with the certificate or its signature, or if a "
        "profile of --require is not found conformant by it."
    )


def run(arguments: argparse.Namespace) -> int:
    """Check, and say what is wrong; the exit code."""
    try:
        required = list(profiles_named(arguments.require)) if arguments.require else []
    except ValueError as error:
        raise UsageError(f"--require: {error}") from None
    try:
        path = certificate_file(arguments.folder)
        document = read_certificate(path)
        key: str | None = arguments.signed_by
        comment = trusted_comment(path, key) if key is not None else None
        found = list(problems(document))
        junit = path.with_name(JUNIT)
        if not found and junit.exists():
            found += junit_problems(document, junit)
    except OSError as error:
        raise UsageError(f"{arguments.folder}: {error.strerror}") from error
    except NoKey as error:
        raise UsageError(f"--signed-by: {error}") from None
    except (Unreadable, NotSigned) as error:
        document, comment, found = {}, None, [str(error)]
    for problem in found:
        print(f"{path}: {problem}", file=sys.stderr)
    if found:
        return 1
    suite = document["suite"]["version"]
    if suite != VERSION:
        print(f"made by version {suite} of the suite: its requirements were not compared with mine")
    cases, files = document["run"]["cases_left_out"], document["run"]["files_left_out"]
    if cases or files:
        left_out = f"{count_of(cases, 'case')} and {count_of(len(files), 'file')}"
        print(f"of a selection: {left_out} of the suite were left out")
    if comment is not None:
        print(f"{path}: signed; {comment}")
    print(f"{path}: consistent; {document['target']['name']}: {document['sentence']}")
    said = {row["profile"]: row["conclusion"] for row in document["profiles"]}
    missed = [profile for profile in required if said[profile] != str(Conclusion.CONFORMANT)]
    for profile in missed:
        print(f"{path}: {profile}: {said[profile]}, and --require asks for it", file=sys.stderr)
    return int(bool(missed))

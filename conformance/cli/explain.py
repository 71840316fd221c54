"""The subcommand `explain`: one requirement, what it stands on, and the cases that check it."""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

from conformance.cli.cases import CannotCollect, Case, collect_cases
from conformance.cli.certify import PACKAGE
from conformance.exit_codes import EXIT_HARNESS_FAULT
from conformance.requirements import Requirement, UnknownRequirement, catalogue
from conformance.settings import UsageError
from conformance.target import BUILT_IN, load_target

_COLUMNS = 96


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `explain`."""
    parser.add_argument("id", help="the id of a requirement, such as all_reduce/same-bits")


def run(arguments: argparse.Namespace) -> int:
    """Explain; the exit code."""
    try:
        requirement = catalogue()[arguments.id]
    except UnknownRequirement as error:
        raise UsageError(error.args[0]) from error
    try:
        cases = [case for case in collect_cases() if requirement.id in case.covers]
    except CannotCollect as error:
        print(f"c10d-conformance explain: cannot collect the cases: {error}", file=sys.stderr)
        return EXIT_HARNESS_FAULT
    print("\n".join(_explained(requirement, cases)))
    return 0


def _explained(requirement: Requirement, cases: list[Case]) -> Iterator[str]:
    yield f"{requirement.id} ({requirement.level}, profile {requirement.profile})"
    yield from _wrapped(requirement.says, "  ")
    yield ""
    yield f"source     {requirement.source}"
    for name in requirement.needs:
        yield f"needs      {name}"
    for id in catalogue().roots(requirement.id):
        how = "" if id in requirement.rests_on else "  (through another)"
        yield f"rests on   {id}{how}"
    for other in catalogue().values():
        if requirement.id in other.rests_on:
            yield f"carries    {other.id}"
    for path in sorted(BUILT_IN.glob("*.toml")):
        deviation = load_target(path.stem).deviation(requirement.id)
        if deviation is not None:
            yield ""
            yield f"deviation of {path.stem}, {deviation.expects}: {deviation.link}".rstrip(": ")
            yield from _wrapped(deviation.reason, "  ")
            yield from textwrap.indent(deviation.example.rstrip(), "    ").splitlines()
    for case in cases:
        sizes = ", ".join(map(str, case.world_sizes))
        yield ""
        yield f"case       {_near(PACKAGE.parent / case.path)}:{case.line}"
        yield f"  {case.nodeid.partition('::')[2]}"
        yield from _wrapped(case.says, "  ")
        yield f"  {case.runs} runs{f', world sizes {sizes}' if sizes else ''}"


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, _COLUMNS, initial_indent=indent, subsequent_indent=indent)


def _near(path: Path) -> Path:
    """The path from here, if it lies below."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path

"""The subcommand `explain`: a rule's source, needs, dependencies, deviations, cases and mutants."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Iterator
from pathlib import Path

from conformance.catalogue.cases import Case, cases_covering
from conformance.catalogue.chapters import PACKAGE
from conformance.catalogue.mutants import Mutant, mutants_of
from conformance.catalogue.rules import catalogue, rules
from conformance.rule import Requirement, UnknownRequirement
from conformance.run.settings import DEFAULT_WORLD_SIZES, UsageError
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
    id = requirement.id
    print("\n".join(_explained(requirement, cases_covering(id), mutants_of(id))))
    return 0


def _explained(requirement: Requirement, cases: list[Case], mutants: list[Mutant]) -> Iterator[str]:
    yield f"{requirement.id} ({requirement.level}, profile {requirement.profile})"
    yield from _wrapped(requirement.says, "  ")
    yield ""
    rule = rules()[requirement.id]
    yield f"written    {_near(rule.file)}:{rule.line}"
    yield f"source     {requirement.source}"
    for name in catalogue().needs(requirement.id):
        how = "" if name in requirement.needs else f"  (through {_origin(requirement, name)})"
        yield f"needs      {name}{how}"
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
        yield ""
        yield f"case       {_near(PACKAGE.parent / case.path)}:{case.line}"
        yield f"  {case.name}"
        yield from _wrapped(case.says, "  ")
        yield from _world_sizes(case)
    for mutant in mutants:
        yield ""
        yield f"mutant     {_near(mutant.file)}:{mutant.line}"
        yield f"  {mutant.name}"
        yield from _wrapped(mutant.says, "  ")


def _origin(requirement: Requirement, need: str) -> str:
    """A requirement that needs this, of those on which the given one rests."""
    roots = catalogue().roots(requirement.id)
    return next(id for id in roots if need in catalogue()[id].needs)


def _world_sizes(case: Case) -> Iterator[str]:
    sizes = ", ".join(map(str, case.world_sizes))
    if case.at_least is not None:
        asked = ", ".join(str(n) for n in DEFAULT_WORLD_SIZES if n >= case.at_least)
        sizes = f"{sizes or asked}, and any from {case.at_least} on with --world-sizes"
    if sizes:
        yield f"  world sizes {sizes}"


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, _COLUMNS, initial_indent=indent, subsequent_indent=indent)


def _near(path: Path) -> Path:
    """The path from here, if it lies below."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path

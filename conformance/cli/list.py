"""The subcommand `list`: rules by profile, the page of all of them, or the known capabilities."""

from __future__ import annotations

import argparse
import sys

from conformance.capabilities import DEVICE_FEATURES, FEATURES, VOCABULARY, Capabilities
from conformance.catalogue.page import page
from conformance.catalogue.rules import catalogue
from conformance.cli.tables import show_json, show_table
from conformance.rule import (
    GROUPS,
    PROFILES,
    Level,
    Requirement,
    UnknownRequirement,
    profiles_named,
)
from conformance.run.settings import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `list`."""
    parser.add_argument("pattern", nargs="*", help="ids or patterns such as 'all_reduce/*'")
    parser.add_argument(
        "--profile",
        metavar="NAME,...",
        help=f"only these profiles, or of {', '.join(GROUPS)}",
    )
    parser.add_argument("--level", choices=[str(level) for level in Level], help="only this level")
    parser.add_argument("--capabilities", action="store_true", help="what a target may claim")
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.add_argument(
        "--page", action="store_true", help="all rules with links to cases and mutants, as Markdown"
    )


def run(arguments: argparse.Namespace) -> int:
    """Show what was asked for; the exit code."""
    if arguments.capabilities:
        if arguments.pattern or arguments.profile or arguments.level:
            raise UsageError("--capabilities lists all of them: it takes no pattern and no filter")
        _show_capabilities(as_json=arguments.json)
        return 0
    if arguments.page:
        if arguments.pattern or arguments.profile or arguments.level or arguments.json:
            raise UsageError("--page shows all rules: it takes no pattern, filter or --json")
        sys.stdout.write(page())
        return 0
    chosen = _chosen(arguments)
    if arguments.json:
        show_json([requirement.to_plain() for requirement in chosen])
        return 0
    for profile in PROFILES:
        rows = [(r.id, str(r.level), r.says) for r in chosen if r.profile == profile]
        if rows:
            show_table(profile, ("requirement", "level", "says"), rows)
    return 0


def _chosen(arguments: argparse.Namespace) -> list[Requirement]:
    try:
        profiles = profiles_named(arguments.profile) if arguments.profile else PROFILES
    except ValueError as error:
        raise UsageError(str(error)) from None
    try:
        matching = [catalogue().matching(pattern) for pattern in arguments.pattern or ["*"]]
    except UnknownRequirement as error:
        raise UsageError(error.args[0]) from error
    ids = {r.id for found in matching for r in found}
    levels = [arguments.level] if arguments.level else [str(level) for level in Level]
    return [
        r
        for r in catalogue().values()
        if r.id in ids and r.profile in profiles and str(r.level) in levels
    ]


def _show_capabilities(*, as_json: bool) -> None:
    plain = Capabilities()
    means = {**FEATURES, **DEVICE_FEATURES}
    if as_json:
        show_json(
            {
                kind: [
                    {
                        "name": name,
                        "default": name in getattr(plain, kind),
                        "means": means.get(name, ""),
                    }
                    for name in names
                ]
                for kind, names in VOCABULARY.items()
            }
        )
        return
    for kind, names in VOCABULARY.items():
        columns = ("name", "unless said otherwise", "means")
        rows = [
            (name, "claimed" if name in getattr(plain, kind) else "", means.get(name, ""))
            for name in names
        ]
        show_table(kind, columns, rows)

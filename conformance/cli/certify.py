"""The subcommand `certify`: runs pytest on the suite's cases, with workers or under a launcher."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import os
import sys
from collections.abc import Iterator, Sequence

import pytest

import conformance.early_torch  # noqa: F401  # before what else imports torch
from conformance.catalogue.chapters import chapter_files
from conformance.exit_codes import EXIT_USAGE
from conformance.harness.launcher import NO_WORKERS, LauncherError, NotLaunched, launch, place
from conformance.run.invocation import suite_arguments
from conformance.run.options import OPTIONS
from conformance.run.selection import is_asked_for
from conformance.run.settings import Settings, UsageError, read_settings

_CERTIFICATE = "certificate/{target}"
_WORKERS_MAX = 8
_ALMOST = 0.85  # in difflib's measure: one or two letters of an option are other ones


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `certify`; those that are missing here are pytest's."""
    for flag, how in OPTIONS.items():
        parser.add_argument(flag, **how)
    parser.set_defaults(certificate=_CERTIFICATE)
    parser.add_argument(
        "-n",
        dest="workers",
        metavar="N",
        help=f"pytest workers, 0 for none (default: {default_workers()}; fewer for a selection of "
        "few files)",
    )
    parser.epilog = (
        "All other options go on to pytest, such as -k EXPRESSION, -x or -v; of its plugins, it "
        "loads those that are named, as in -p html. Exit code: 0 "
        "conformant, 1 not, 2 usage, 3 harness fault. The certificate goes to "
        "certificate/<name of the target> in this folder unless --certificate says otherwise."
    )


def run(arguments: argparse.Namespace) -> int:
    """Certify; the exit code."""
    _refuse_misspelt(arguments.rest)
    if os.getcwd() not in sys.path:  # a target may be in this folder, as with `python -m`
        sys.path.insert(0, os.getcwd())
    settings = _settings(arguments)
    launcher = settings.target.launch if settings else ""
    if launcher and arguments.launcher != "none" and not _is_launched(arguments):
        return _launch_ranks(launcher, arguments)
    launched = _is_launched(arguments)
    if launched and arguments.workers not in (None, "0"):
        raise UsageError(NO_WORKERS)
    workers = [] if launched else _workers(arguments, settings)
    with _nothing_from_around():
        options = [*_options(arguments), *workers, *arguments.rest]
        code = pytest.main([*suite_arguments(), *options])
    return EXIT_USAGE if code == pytest.ExitCode.USAGE_ERROR else int(code)


def _refuse_misspelt(rest: Sequence[str]) -> None:
    """Raises UsageError for what is almost an option of ours: pytest would only say that it does
    not know it."""
    for word in rest:
        flag = word.partition("=")[0]
        close = difflib.get_close_matches(flag, OPTIONS, n=1, cutoff=_ALMOST)
        if flag.startswith("--") and close:
            raise UsageError(f"unrecognized argument {flag}; did you mean {close[0]}?")


@contextlib.contextmanager
def _nothing_from_around() -> Iterator[None]:
    """The suite runs in the same way whatever is installed beside it: pytest loads those plugins
    that are named, and takes no options from the environment."""
    before = os.environ.copy()
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    for name in ("PYTEST_ADDOPTS", "PYTEST_PLUGINS"):
        os.environ.pop(name, None)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def default_workers() -> int:
    """Twice the processors: ranks wait more than they compute. At least 2, so that one hanging
    rank does not hold up everything."""
    return max(2, min(2 * len(os.sched_getaffinity(0)), _WORKERS_MAX))


def _settings(arguments: argparse.Namespace) -> Settings | None:
    """None if they are wrong; pytest will say so."""
    try:
        return read_settings(
            target=arguments.target,
            world_sizes=arguments.world_sizes,
            profiles=arguments.profile,
            requirements=arguments.requirement,
            certificate=None,
            device=arguments.device,
            deadline_s=arguments.deadline,
            budget=arguments.budget,
            cases_per_rule=arguments.cases_per_rule,
        )
    except UsageError:
        return None


def _launch_ranks(launcher: str, arguments: argparse.Namespace) -> int:
    """Start this command again on all ranks; the exit code."""
    given = [*_options(arguments), *arguments.rest]
    try:
        return launch(launcher, [sys.executable, "-m", "conformance", "certify", *given])
    except LauncherError as error:
        raise UsageError(str(error)) from error


def _workers(arguments: argparse.Namespace, settings: Settings | None) -> list[str]:
    """The options of pytest-xdist. Under a launcher there is one set of ranks, which workers cannot
    share."""
    if "no:xdist" in arguments.rest:
        return []
    return ["-p", "xdist", "-n", arguments.workers or str(_workers_for(settings))]


def _workers_for(settings: Settings | None) -> int:
    """As many as have something to do: each of them imports torch, and so does its fork server."""
    if settings is None:
        return 0
    files = sum(is_asked_for(file, settings) for file in chapter_files())
    return min(default_workers(), files) if files > 1 else 0


def _is_launched(arguments: argparse.Namespace) -> bool:
    try:
        return place(arguments.launcher) is not None
    except NotLaunched:
        return False
    except LauncherError:
        return True  # pytest will say so


def _options(arguments: argparse.Namespace) -> list[str]:
    """Those of the suite that were given."""
    given = []
    for flag, how in OPTIONS.items():
        value = getattr(arguments, flag.removeprefix("--").replace("-", "_"))
        if how.get("action") == "store_true":
            given += [flag] if value else []
            continue
        values = value if how.get("action") == "append" else [value]
        given += [f"{flag}={v}" for v in values if v is not None]
    return given

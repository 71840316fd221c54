"""The command line and its subcommands: `python -m conformance` or `c10d-conformance`."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from conformance.exit_codes import EXIT_INTERRUPTED, EXIT_USAGE
from conformance.version import VERSION

# Name -> module and what it does. A module is imported when its command is chosen.
COMMANDS = {
    "init": ("conformance.cli.init", "write a target file for a backend, by trying what it can do"),
    "certify": ("conformance.cli.certify", "run the suite against a target"),
    "list": ("conformance.cli.list", "show requirements, or the vocabulary of capabilities"),
    "explain": ("conformance.cli.explain", "show one requirement and the cases that check it"),
    "ask": ("conformance.cli.ask", "show what several targets do where a rule is checked"),
    "bench": ("conformance.bench.command", "measure a target against others"),
    "power": ("conformance.power.command", "measure how many bugs of a backend the suite rejects"),
    "compare": ("conformance.cli.compare", "show what changed between two certificates"),
    "site": ("conformance.cli.site", "build a static site out of many certificates"),
    "verify": ("conformance.cli.verify", "check that a certificate is whole and consistent"),
}

# Module of another distribution that the suite needs -> what pip calls it.
_NEEDED = {
    "torch": "torch",
    "numpy": "numpy",
    "pytest": "pytest",
    "xdist": "pytest-xdist",
    "hypothesis": "hypothesis",
    "jinja2": "jinja2",
    "rich": "rich",
    "packaging": "packaging",
    "tomli": "tomli",
}

# Commands that pass options which they do not know on, as `arguments.rest`.
_PASS_ON = {"certify"}


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USAGE, f"{self.prog}: {message} (see {self.prog} --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; returns its exit code, see `conformance.exit_codes`."""
    try:
        return _run(argv)
    except KeyboardInterrupt:  # maybe while a command is imported
        return EXIT_INTERRUPTED
    except ModuleNotFoundError as error:  # so is what tells that a distribution is missing
        needed = _NEEDED.get(str(error.name).partition(".")[0])
        if needed is None:
            raise
        python = sys.executable
        missing = " ".join(dict.fromkeys((needed, *_missing())))
        said = (
            f"{needed} is needed, and {python} does not have it: {python} -m pip install {missing}"
        )
        print(f"c10d-conformance: {said}", file=sys.stderr)
        return EXIT_USAGE


def _missing() -> list[str]:
    """Distributions that the suite needs and this Python does not have."""
    has_toml = sys.version_info >= (3, 11)
    modules = [name for name in _NEEDED if not (name == "tomli" and has_toml)]
    return [_NEEDED[name] for name in modules if importlib.util.find_spec(name) is None]


def _run(argv: Sequence[str] | None) -> int:
    from conformance.run.settings import UsageError  # which needs what may be missing

    arguments, rest = _parser(sys.argv[1:] if argv is None else argv)
    module = importlib.import_module(COMMANDS[arguments.command][0])
    arguments.rest = rest
    try:
        code: int = module.run(arguments)
        sys.stdout.flush()
    except UsageError as error:
        print(f"c10d-conformance {arguments.command}: {error}", file=sys.stderr)
        return EXIT_USAGE
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code


def _parser(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = _Parser(prog="c10d-conformance", description=__doc__, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=VERSION)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (module, help) in COMMANDS.items():
        command = commands.add_parser(name, help=help, description=help, allow_abbrev=False)
        if name in argv:
            importlib.import_module(module).add_arguments(command)
    arguments, rest = parser.parse_known_args(argv)
    if rest and arguments.command not in _PASS_ON:
        commands.choices[arguments.command].error(f"unrecognized arguments: {' '.join(rest)}")
    return arguments, rest


if __name__ == "__main__":
    sys.exit(main())

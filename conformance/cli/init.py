"""The subcommand `init`: tries what a backend can do, and writes a target file that says so."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path

import torch

from conformance.exit_codes import EXIT_HARNESS_FAULT
from conformance.harness.failure import RanksFailed
from conformance.harness.rank import HarnessFault
from conformance.probing.findings import Finding, Seen
from conformance.probing.prober import DEADLINE_S, asking, find_all
from conformance.probing.target_file import left_out, name_for, target_file
from conformance.probing.wrapped_backends import holds_a_group_of
from conformance.run.first_look import look_at
from conformance.run.settings import UsageError, check_python
from conformance.target import Target, load_target

_BASE = "torch"  # the built-in target that a wrapper may extend


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `init`."""
    parser.add_argument("backend", help="what init_process_group is given, such as gloo")
    parser.add_argument(
        "--import",
        dest="imports",
        action="append",
        default=[],
        metavar="MODULE",
        help="a module that registers the backend; may be repeated",
    )
    parser.add_argument(
        "--device", default="cpu", metavar="TYPE", help="the type of its device (default: cpu)"
    )
    parser.add_argument("--ddp", default="", metavar="MODULE:CLASS", help="your DDP, if any")
    parser.add_argument("--fsdp", default="", metavar="MODULE:CLASS", help="your FSDP, if any")
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="what to write (default: BACKEND.toml)"
    )
    parser.add_argument("--force", action="store_true", help="replace a file that is there")
    parser.epilog = (
        "Starts two ranks on this machine and tries each operation, dtype, reduction and most "
        f"features once; what hangs is given up after {DEADLINE_S:g} s. Exit code: 0, 2 if the "
        "backend cannot be used or nothing of it works, 3 if no ranks could be started."
    )


def run(arguments: argparse.Namespace) -> int:
    """Probe and write; the exit code."""
    check_python()
    if os.getcwd() not in sys.path:  # the backend may be in this folder, as with `python -m`
        sys.path.insert(0, os.getcwd())
    target = _target(arguments)
    output = arguments.output or Path(f"{target.name}.toml")
    _check_output(output, replaces=arguments.force)
    try:
        findings, base = _findings(target)
    except HarnessFault as error:
        print(f"c10d-conformance init: {error}", file=sys.stderr)
        return EXIT_HARNESS_FAULT
    except RanksFailed as error:
        raise UsageError(f"{target.backend}: {error.doing} failed: {error.brief}") from error
    text = target_file(target, findings, _made_by(arguments), base)
    _write(output, text, replaces=arguments.force)
    _show_next(output, base)
    return 0


def _target(arguments: argparse.Namespace) -> Target:
    for name in arguments.imports:
        if name.endswith(".py"):
            module = Path(name).stem
            raise UsageError(f"--import {name}: name the module, {module}, and not its file")
    try:
        target = Target(
            name=name_for(arguments.backend),
            backend=arguments.backend,
            imports=tuple(arguments.imports),
            device=arguments.device,
            ddp=arguments.ddp,
            fsdp=arguments.fsdp,
        )
    except ValueError as error:
        raise UsageError(str(error)) from error
    missing = look_at(target).error
    if missing:
        raise UsageError(missing)
    return target


def _check_output(output: Path, *, replaces: bool) -> None:
    """Before a minute goes into probing."""
    if output.suffix != ".toml":
        raise UsageError(f"--output {output}: the name of a target file ends in .toml")
    if output.exists() and not replaces:
        raise UsageError(f"{output} exists; --force replaces it, --output writes another file")
    if not output.parent.is_dir() or not os.access(output.parent, os.W_OK):
        raise UsageError(f"--output {output}: cannot write into the folder {output.parent}")


def _findings(target: Target) -> tuple[dict[str, dict[str, Finding]], str]:
    """What was seen of each kind, and "torch" if the backend holds a group of torch's, else "".

    Prints each kind when it is done."""
    findings = {}
    with asking(target) as ask:
        for kind, found in find_all(ask):
            findings[kind] = found
            _show_kind(kind, found)
            if kind == "ops":
                _check_anything_works(target, found)
        holds = ask(holds_a_group_of(load_target(_BASE).backend)).works
    return findings, _BASE if holds else ""


def _show_kind(kind: str, found: dict[str, Finding]) -> None:
    working = [name for name, finding in found.items() if finding.works]
    print(f"{kind}: {len(working)} of {len(found)} work: {', '.join(working) or 'none'}")
    wrong = {name: finding for name, finding in found.items() if finding.seen is Seen.WRONG}
    for line in left_out(wrong):
        print(f"  WRONG DATA: {line}")
    sys.stdout.flush()


def _check_anything_works(target: Target, ops: dict[str, Finding]) -> None:
    if not any(finding.works for finding in ops.values()):
        name, finding = next(iter(ops.items()))
        raise UsageError(f"{target.backend}: no operation works; {name}: {finding.says}")


def _made_by(arguments: argparse.Namespace) -> str:
    options = [word for module in arguments.imports for word in ("--import", module)]
    if arguments.device != "cpu":
        options += ["--device", arguments.device]
    version = torch.__version__.partition("+")[0]
    command = shlex.join(["python", "-m", "conformance", "init", arguments.backend, *options])
    return f"Written by `{command}`, with torch {version}."


def _write(output: Path, text: str, *, replaces: bool) -> None:
    try:
        with open(output, "w" if replaces else "x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise UsageError(f"--output {output}: {error.strerror}") from error


def _show_next(output: Path, base: str) -> None:
    certify = f"python -m conformance certify --target {shlex.quote(str(output))}"
    inherits = ""
    if base:
        inherits = f", and how to inherit\nwhat is known of {base}, of which it holds a group"
    print(
        f"""
{output} is written. Read it: it says why it does not claim the rest{inherits}.
Next, a first look, in some seconds:
  {certify} --requirement 'all_reduce/*'
and then everything:
  {certify}"""
    )

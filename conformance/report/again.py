"""Builds the pytest command line that runs exactly one case again."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from conformance.run.settings import DEADLINE_S, Settings

_SUITE = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True)
class Invocation:
    """Where pytest was called.

    rootdir: what node ids are relative to.
    invoked_in: the folder it was called in, which relative paths of options refer to.
    """

    rootdir: Path
    invoked_in: Path


def command_again(
    nodeid: str,
    path: Path,
    invocation: Invocation,
    settings: Settings,
    device: str | None,
    seed: int | None = None,
) -> list[str]:
    """Words of the command; it can be pasted in the rootdir, and where pytest was called.

    path: the case's file; with --pyargs the node id does not lead there.
    device: what `--device` was given.
    seed: by which the case drew its examples, if it was told one.
    """
    file, separator, rest = nodeid.partition("::")
    at_root = invocation.rootdir == invocation.invoked_in and invocation.rootdir / file == path
    command = [_python(), "-m", "pytest"]
    if not path.is_relative_to(_SUITE):
        command += ["-p", "conformance.plugin"]  # the suite's own conftest does that
    if not at_root:
        command += ["--rootdir", str(invocation.rootdir)]
    command.append((file if at_root else str(path)) + separator + rest)
    command += ["--target", settings.spec if at_root else _from_anywhere(settings.spec, invocation)]
    if settings.world_sizes is not None:
        command += ["--world-sizes", ",".join(map(str, settings.world_sizes))]
    if device:
        command += ["--device", device]
    if seed is not None:
        command += ["--seed", str(seed)]
    if settings.deadline_s != DEADLINE_S:
        command += ["--deadline", f"{settings.deadline_s:g}"]
    return command


def _from_anywhere(spec: str, invocation: Invocation) -> str:
    parts = spec.split("@")
    return "@".join(str(invocation.invoked_in / p) if p.endswith(".toml") else p for p in parts)


def _python() -> str:
    """ "python" if that is the one that runs now, and its path otherwise."""
    found = shutil.which("python")
    same = found is not None and os.path.dirname(found) == os.path.dirname(sys.executable)
    return "python" if same else sys.executable

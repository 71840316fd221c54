"""The first look at a target, before anything starts: is everything there that it names?"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

import torch.distributed as dist

from conformance.harness.rank import HarnessFault, fork_server_context
from conformance.target import Target, resolve

_DEADLINE_S = 120.0


@dataclass(frozen=True, slots=True)
class FirstLook:
    """What was seen of the target. error is one line, "" if all is there.

    versions: of the distributions that the target names.
    """

    error: str
    versions: dict[str, str] = field(default_factory=dict)


def look_at(target: Target) -> FirstLook:
    """See whether everything is there that the target names.

    Modules that are not loaded yet are imported in a process of their own: they may register
    backends, start threads or crash, and none of that may happen here.
    """
    error = _error(target)
    return FirstLook(error, {} if error else versions_of(target))


def versions_of(target: Target) -> dict[str, str]:
    """The versions of the distributions that the target names."""
    return {name: _version(name) for name in target.distributions}


def _error(target: Target) -> str:
    names = (target.ddp, target.fsdp, target.sync_batchnorm, target.options, target.activate)
    given = tuple(name for name in names if name)
    there = tuple(name for name in given if name.partition(":")[0] in sys.modules)
    imports = tuple(name for name in target.imports if name not in sys.modules)
    elsewhere = tuple(name for name in given if name not in there)
    # What is entered in each rank may register the backend.
    backend = "" if target.activate else target.backend
    if not imports and not elsewhere:
        return missing((), there, backend)
    env = tuple(sorted(target.env.items()))
    # All of them, loaded here or not: they may be what registers the backend.
    return missing((), there, "") or _missing_elsewhere(target.imports, elsewhere, backend, env)


def missing(imports: Sequence[str], references: Sequence[str], backend: str) -> str:
    """What is not there when a process imports these, in one line; "" if all is.

    references: "module:attribute" each.
    backend: as `init_process_group` takes it, or "" for one that cannot be told yet.
    """
    step = ""
    try:
        for module in imports:
            step = f"cannot import {module!r}"
            importlib.import_module(module)
        for reference in references:
            step = f"cannot find {reference!r}"
            resolve(reference)
    except Exception as error:
        return f"{step}: {type(error).__name__}: {error}".splitlines()[0]
    for name in backend.split(",") if backend else ():
        if not dist.is_backend_available(name.rpartition(":")[2]):
            return f"there is no backend {name!r}, and nothing that it imports registers one"
    return ""


@cache
def _missing_elsewhere(
    imports: tuple[str, ...],
    references: tuple[str, ...],
    backend: str,
    env: tuple[tuple[str, str], ...],
) -> str:
    """As `missing`, in a process of its own with these environment variables.

    It comes from the fork server, so torch is not imported once more, and answers through a file:
    modules may print at any time. A machine on which none can be started is no mistake of the
    target's; the ranks will say so.
    """
    with (
        tempfile.NamedTemporaryFile("r", prefix="conformance-look-") as answer,
        tempfile.NamedTemporaryFile("r", prefix="conformance-look-", errors="replace") as printed,
    ):
        task = (tuple(sys.path), env, imports, references, backend, answer.name, printed.name)
        try:
            process = fork_server_context().Process(target=_tell, args=task)
            process.start()
        except (HarnessFault, OSError, EOFError):
            return ""
        try:
            process.join(_DEADLINE_S)
            if process.is_alive():
                return f"importing it did not end within {_DEADLINE_S:g} s"
        finally:
            process.kill()
            process.join()
        told = answer.read()
        said = printed.read().strip()
    if not told:
        why = (said.splitlines() or [f"exit code {process.exitcode}"])[-1]
        return f"importing it ended the process: {why}"
    error: str = json.loads(told)
    return error


def _tell(
    search_path: tuple[str, ...],
    env: tuple[tuple[str, str], ...],
    imports: tuple[str, ...],
    references: tuple[str, ...],
    backend: str,
    answer: str,
    printed: str,
) -> None:
    """The other process; `answer` and `printed` are the files that the first one reads."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(os.open(printed, os.O_WRONLY | os.O_APPEND), 2)
    warnings.resetwarnings()  # as in a rank
    warnings.simplefilter("default")
    sys.path[:] = search_path
    os.environ.update(env)
    error = missing(imports, references, backend)
    with open(answer, "w") as file:
        json.dump(error, file)


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed as a distribution"

"""Checks before a run that a target's imports, classes, backend and devices exist; its versions."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import torch.distributed as dist

from conformance.harness import devices
from conformance.harness.rank import HarnessFault, fork_server_context
from conformance.target import Target, built_in_target, resolve

_DEADLINE_S = 120.0


@dataclass(frozen=True, slots=True)
class FirstLook:
    """What was seen of the target. error is one line, "" if all is there.

    versions: of the distributions that the target names.
    devices: the names of those of its type, where only its modules make that type known.
    lacks: capabilities that it cannot have on its device, see `devices.lacks`.
    """

    error: str
    versions: dict[str, str] = field(default_factory=dict)
    devices: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()


def look_at(target: Target) -> FirstLook:
    """See whether everything is there that the target names.

    Modules that are not loaded yet are imported in a process of their own: they may register
    backends, start threads or crash, and none of that may happen here.
    """
    seen = _seen(target)
    return seen if seen.error else replace(seen, versions=versions_of(target))


def versions_of(target: Target) -> dict[str, str]:
    """The versions of the distributions that the target names."""
    return {name: _version(name) for name in target.distributions}


def devices_of(target: Target) -> int:
    """How many devices of the target's type there are, in this process or after its imports."""
    if devices.is_known(target.device):
        return devices.count(target.device)
    return len(_seen(target).devices)


def lacking(target: Target) -> tuple[str, ...]:
    """The capabilities that the target cannot have on its device."""
    return () if target.device == devices.HOST else _seen(target).lacks


def takes_a_process(target: Target) -> bool:
    """Whether `look_at` needs one: to import what is not loaded yet, or to try a device."""
    loads = _not_loaded(target.imports) or _not_loaded(_classes(target))
    return bool(loads) or target.device != devices.HOST


def _not_loaded(names: Sequence[str]) -> tuple[str, ...]:
    """Those modules, or "module:attribute", that this process has not imported."""
    return tuple(name for name in names if name.partition(":")[0] not in sys.modules)


def _classes(target: Target) -> tuple[str, ...]:
    """What the target names as "module:attribute", but for what every torch has: to import torch's
    FSDP takes as long as the rest of the look."""
    names = (
        *(target.ddp, target.fsdp, target.sync_batchnorm),
        *(target.store, target.options, target.activate),
    )
    torchs = built_in_target("torch")
    assert torchs is not None
    known = {torchs.ddp, torchs.fsdp, torchs.sync_batchnorm, torchs.store}
    return tuple(name for name in names if name and name not in known)


def _seen(target: Target) -> FirstLook:
    """What is there, but for versions."""
    elsewhere = _not_loaded(_classes(target))
    there = tuple(name for name in _classes(target) if name not in elsewhere)
    # What is entered in each rank may register the backend.
    backend = "" if target.activate else target.backend
    if not takes_a_process(target):
        return FirstLook(missing((), there, backend))
    env = tuple(sorted(target.env.items()))
    error = missing((), there, "")
    if error:
        return FirstLook(error)
    # All of them, loaded here or not: they may be what registers the backend.
    return _seen_elsewhere(target.imports, elsewhere, backend, target.device, env)


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
def _seen_elsewhere(
    imports: tuple[str, ...],
    references: tuple[str, ...],
    backend: str,
    device: str,
    env: tuple[tuple[str, str], ...],
) -> FirstLook:
    """What `missing` says, devices and what they lack, in a process of its own with these
    environment variables.

    It comes from the fork server, so torch is not imported once more, and answers through a file:
    modules may print at any time. A machine on which none can be started is no mistake of the
    target's; the ranks will say so.
    """
    with (
        tempfile.NamedTemporaryFile("r", prefix="conformance-look-") as answer,
        tempfile.NamedTemporaryFile("r", prefix="conformance-look-", errors="replace") as printed,
    ):
        names = (imports, references, backend, device)
        task = (tuple(sys.path), env, *names, answer.name, printed.name)
        try:
            process = fork_server_context().Process(target=_tell, args=task)
            process.start()
        except (HarnessFault, OSError, EOFError):
            return FirstLook("")
        try:
            process.join(_DEADLINE_S)
            if process.is_alive():
                return FirstLook(f"importing it did not end within {_DEADLINE_S:g} s")
        finally:
            process.kill()
            process.join()
        told = answer.read()
        said = printed.read().strip()
    if not told:
        why = (said.splitlines() or [f"exit code {process.exitcode}"])[-1]
        return FirstLook(f"importing it ended the process: {why}")
    error, found, lacks = json.loads(told)
    return FirstLook(error, devices=tuple(found), lacks=tuple(lacks))


def _tell(
    search_path: tuple[str, ...],
    env: tuple[tuple[str, str], ...],
    imports: tuple[str, ...],
    references: tuple[str, ...],
    backend: str,
    device: str,
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
    # One that is known before is asked for its name where the certificate is written.
    is_new = not devices.is_known(device)
    error = missing(imports, references, backend) or devices.why_unusable(device)
    found = devices.names(device) if is_new and not error else []
    lacks = devices.lacks(device) if not error else ()
    with open(answer, "w") as file:
        json.dump((error, found, lacks), file)


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed as a distribution"

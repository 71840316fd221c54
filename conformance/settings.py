"""The options of a run, checked; and the first look at the target before anything starts."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from conformance.requirements import PROFILES, UnknownRequirement, catalogue
from conformance.target import Target, TargetError, load_target, on_device, resolve

WORLD_SIZE_MAX = 64
DEFAULT_WORLD_SIZES = (1, 2, 3, 4)
DEADLINE_S = 60.0  # how long the ranks may take for one call


class UsageError(Exception):
    """Options that cannot be followed; the message is one line for the user."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What a run was asked to do.

    world_sizes: None where the cases decide themselves.
    world_size_max: how many ranks there are at all; torchrun has a fixed number of them.
    """

    target: Target
    spec: str
    world_sizes: tuple[int, ...] | None
    profiles: tuple[str, ...] | None
    requirements: frozenset[str] | None
    certificate: Path | None
    device: str
    deadline_s: float
    world_size_max: int = WORLD_SIZE_MAX

    def selects(self, requirement: str) -> bool:
        """Whether --profile and --requirement leave this requirement in."""
        if self.profiles is not None and catalogue()[requirement].profile not in self.profiles:
            return False
        return self.requirements is None or requirement in self.requirements

    @property
    def is_selective(self) -> bool:
        """Whether --profile or --requirement was given."""
        return self.profiles is not None or self.requirements is not None

    def sizes_for(self, listed: tuple[int, ...], at_least: int | None) -> tuple[int, ...]:
        """The world sizes at which a case runs.

        listed: the sizes that the case names, or ().
        at_least: the case takes every size from this one on that is asked for; None if it takes
            only those that it names.
        """
        asked = self.world_sizes or listed or DEFAULT_WORLD_SIZES
        sizes = [n for n in asked if n in listed or (at_least is not None and n >= at_least)]
        return tuple(n for n in sizes if n <= self.world_size_max)


def read_settings(
    target: str,
    world_sizes: str | None,
    profiles: str | None,
    requirements: Sequence[str],
    certificate: str | None,
    device: str | None,
    deadline_s: float,
) -> Settings:
    """Settings from the texts of the options. Raises UsageError with one line."""
    try:
        found = load_target(target)
        chosen = [r.id for pattern in requirements for r in catalogue().matching(pattern)]
    except TargetError as error:
        raise UsageError(str(error)) from error
    except UnknownRequirement as error:
        raise UsageError(f"--requirement: {error.args[0]}") from error
    if device is not None:
        if device not in ("cpu", "cuda"):
            raise UsageError(f"--device {device}: must be cpu or cuda")
        found = on_device(found, device)
    if found.device == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"target {found.name} is on cuda, and there is no CUDA device here")
    if not deadline_s > 0:
        raise UsageError(f"--deadline {deadline_s}: must be a positive number of seconds")
    return Settings(
        target=found,
        spec=target,
        world_sizes=_world_sizes(world_sizes),
        profiles=_profiles(profiles),
        requirements=frozenset(chosen) if requirements else None,
        certificate=_writable(certificate),
        device=found.device,
        deadline_s=deadline_s,
    )


def _world_sizes(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        sizes = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        raise UsageError(f"--world-sizes {text}: must be numbers such as 1,2,4") from None
    if sizes[0] < 1 or sizes[-1] > WORLD_SIZE_MAX:
        raise UsageError(f"--world-sizes {text}: sizes are from 1 to {WORLD_SIZE_MAX}")
    return sizes


def _profiles(text: str | None) -> tuple[str, ...] | None:
    if text is None:
        return None
    names = tuple(text.split(","))
    for name in names:
        if name not in PROFILES:
            raise UsageError(f"--profile: no profile {name!r}; there are {', '.join(PROFILES)}")
    return names


def _writable(folder: str | None) -> Path | None:
    if folder is None:
        return None
    path = Path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / f".{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UsageError(f"--certificate {folder}: cannot write there: {error.strerror}") from error
    return path


@dataclass(frozen=True, slots=True)
class FirstLook:
    """What a fresh process saw of the target. error is one line, "" if all could be imported."""

    error: str
    versions: dict[str, str]


def look_at(target: Target) -> FirstLook:
    """See whether everything is there that the target names.

    Modules that are not loaded yet are imported in a process of their own: they may register
    backends, start threads or crash, and none of that may happen here.
    """
    names = (target.ddp, target.fsdp, target.sync_batchnorm, target.options, target.activate)
    given = tuple(name for name in names if name)
    there = tuple(name for name in given if name.partition(":")[0] in sys.modules)
    try:
        for name in there:
            resolve(name)
    except AttributeError as missing:
        return FirstLook(f"cannot find {name!r}: AttributeError: {missing}", {})
    imports = tuple(name for name in target.imports if name not in sys.modules)
    elsewhere = tuple(name for name in given if name not in there)
    env = tuple(sorted(target.env.items()))
    error = _import_elsewhere(imports, elsewhere, env) if imports or elsewhere else ""
    return FirstLook(error, {} if error else {n: _version(n) for n in target.distributions})


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed as a distribution"


_LOOK_DEADLINE_S = 120.0


@cache
def _import_elsewhere(
    imports: tuple[str, ...],
    references: tuple[str, ...],
    env: tuple[tuple[str, str], ...],
) -> str:
    """What goes wrong when a fresh process imports these, in one line; "" if nothing does.

    The process answers through a file: modules may print at any time, and after everything else.
    """
    with tempfile.NamedTemporaryFile("r", prefix="conformance-look-") as answer:
        task = json.dumps([imports, references, answer.name])
        path = os.pathsep.join(filter(None, sys.path))
        try:
            seen = subprocess.run(
                [sys.executable, "-c", _IMPORT, task],
                env={**os.environ, **dict(env), "PYTHONPATH": path},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                timeout=_LOOK_DEADLINE_S,
            )
        except subprocess.TimeoutExpired:
            return f"importing it did not end within {_LOOK_DEADLINE_S:g} s"
        told = answer.read()
    if not told:
        why = (seen.stderr.strip().splitlines() or [f"exit code {seen.returncode}"])[-1]
        return f"importing it ended the process: {why}"
    error: str = json.loads(told)
    return error


_IMPORT = """
import importlib, json, sys
imports, references, answer = json.loads(sys.argv[1])
error = ""
try:
    for name in imports:
        step = f"cannot import {name!r}"
        importlib.import_module(name)
    for reference in references:
        step = f"cannot find {reference!r}"
        module, _, attribute = reference.partition(":")
        found = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
except Exception as e:
    error = f"{step}: {type(e).__name__}: {e}".splitlines()[0]
with open(answer, "w") as file:
    json.dump(error, file)
"""

"""`Settings`, the parsed and checked options of a run with defaults; `UsageError` for bad ones."""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from conformance.catalogue.rules import catalogue
from conformance.rule import UnknownRequirement, profiles_named
from conformance.target import (
    Target,
    TargetError,
    check_device,
    load_target,
    on_device,
    with_front_end,
)

WORLD_SIZE_MAX = 64
CASES_WORLD_SIZE_MAX = 6  # no case needs more ranks
DEFAULT_WORLD_SIZES = (1, 2, 3, 4)
REPETITIONS = 3  # of a failed case, on fresh ranks
_SECONDS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}
DEADLINE_S = 60.0  # how long the ranks may take for one call


class UsageError(Exception):
    """Options that cannot be followed; the message is one line for the user."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What a run was asked to do.

    spec: what `--target` was given.
    world_sizes: None where the cases decide themselves.
    profiles, requirements: names and ids of what to check; None for everything.
    certificate: the folder to write it to, or None for no certificate.
    deadline_s: how long the ranks may take for one call, unless the case says otherwise.
    repetitions: how often a failed case is repeated on fresh ranks, 0 for not at all.
    world_size_max: how many ranks there are at all; a launcher has a fixed number of them.
    budget_s: how long after the first case others are started; None for as long as it takes.
    cases_per_rule: how many cases of each requirement run; None for all.
    seed: decides what drawn cases draw; None for what they draw in every run.
    fuzz_s: how long only drawn cases run, with one seed after the other; None for no such run.
    """

    target: Target
    spec: str
    world_sizes: tuple[int, ...] | None
    profiles: tuple[str, ...] | None
    requirements: frozenset[str] | None
    certificate: Path | None
    device: str
    deadline_s: float
    repetitions: int = REPETITIONS
    world_size_max: int = WORLD_SIZE_MAX
    budget_s: float | None = None
    cases_per_rule: int | None = None
    seed: int | None = None
    fuzz_s: float | None = None

    def selects(self, requirement: str) -> bool:
        """Whether --profile and --requirement leave this requirement in."""
        if self.profiles is not None and catalogue()[requirement].profile not in self.profiles:
            return False
        return self.requirements is None or requirement in self.requirements

    def without(self, lacks: Iterable[str]) -> Settings:
        """The same for a target that cannot have these capabilities."""
        claims = self.target.capabilities.without(lacks)
        return replace(self, target=replace(self.target, capabilities=claims))

    @property
    def restricts_world_sizes(self) -> bool:
        """Whether cases may be left out that ask for other world sizes."""
        return self.world_sizes is not None or self.world_size_max < CASES_WORLD_SIZE_MAX

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


def check_python() -> None:
    """Raises UsageError where this Python leaves out `assert`, by which cases and ranks check."""
    if sys.flags.optimize:
        raise UsageError("python -O and PYTHONOPTIMIZE leave out checks: run without them")


def read_settings(
    *,
    target: str,
    world_sizes: str | None,
    profiles: str | None,
    requirements: Sequence[str],
    certificate: str | None,
    device: str | None,
    deadline_s: float,
    repetitions: int = REPETITIONS,
    budget: str | None = None,
    cases_per_rule: int | None = None,
    seed: int | None = None,
    fuzz_minutes: float | None = None,
) -> Settings:
    """Settings from the texts of the options. Raises UsageError with one line."""
    try:
        found = load_target(target)
        patterns = [part.strip() for text in requirements for part in text.split(",")]
        chosen = [r.id for pattern in patterns for r in catalogue().matching(pattern)]
    except TargetError as error:
        raise UsageError(str(error)) from error
    except UnknownRequirement as error:
        raise UsageError(f"--requirement: {error.args[0]}") from error
    found = on_device(with_front_end(found), _device(device) or found.device)
    if why := _why_device_is_unusable(found):
        raise UsageError(f"target {found.name} is on {found.device}, and {why}")
    if not deadline_s > 0:
        raise UsageError(f"--deadline {deadline_s}: must be a positive number of seconds")
    if repetitions < 0:
        raise UsageError(f"--repetitions {repetitions}: must be 0 or more")
    if cases_per_rule is not None and cases_per_rule < 1:
        raise UsageError(f"--cases-per-rule {cases_per_rule}: must be 1 or more")
    if seed is not None and seed < 0:
        raise UsageError(f"--seed {seed}: must be 0 or more")
    if fuzz_minutes is not None and not 0 < fuzz_minutes < math.inf:
        raise UsageError(f"--fuzz {fuzz_minutes}: must be a positive number of minutes")
    return Settings(
        target=found,
        spec=target,
        world_sizes=_world_sizes(world_sizes),
        profiles=_profiles(profiles),
        requirements=frozenset(chosen) if requirements else None,
        certificate=_writable(certificate, found.name),
        device=found.device,
        deadline_s=deadline_s,
        repetitions=repetitions,
        budget_s=_budget(budget),
        cases_per_rule=cases_per_rule,
        seed=seed,
        fuzz_s=None if fuzz_minutes is None else 60.0 * fuzz_minutes,
    )


def _device(name: str | None) -> str:
    try:
        if name is not None:
            check_device(name)
    except ValueError as error:
        raise UsageError(f"--device {name}: {error}") from None
    return name or ""


def _why_device_is_unusable(target: Target) -> str:
    """As far as it can be told before the target's modules are imported; "" if it cannot."""
    if target.device == "cpu":
        return ""
    # It imports torch, which takes a second; most refusals of an option need not wait for that.
    from conformance.harness import devices

    if target.imports and not devices.is_known(target.device):
        return ""
    return devices.why_unusable(target.device)


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
    try:
        return profiles_named(text)
    except ValueError as error:
        raise UsageError(f"--profile: {error}") from None


def _budget(text: str | None) -> float | None:
    try:
        return None if text is None else seconds_of(text)
    except ValueError as error:
        raise UsageError(f"--budget: {error}") from None


def seconds_of(text: str) -> float:
    """The seconds in "90", "60s", "5m" or "1h". Raises ValueError for anything else."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text)
    if found is None or not float(found[1]):
        raise ValueError(f"{text!r} is no time such as 60s or 5m")
    return float(found[1]) * _SECONDS[found[2]]


def _writable(folder: str | None, target: str) -> Path | None:
    if folder is None:
        return None
    name = re.sub(r"^\.|[^\w.@+-]", "_", target)
    path = Path(folder.replace("{target}", name))
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / f".{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UsageError(f"--certificate {folder}: cannot write there: {error.strerror}") from error
    return path

"""Plans a run from pytest marks: what each case covers and lacks, which cases run or only probe, in
which order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType

import pytest

from conformance.capabilities import NEVER_REFUSED
from conformance.catalogue.rules import catalogue, rules
from conformance.chapter import Chapter
from conformance.rule import PART_OF_PROFILE, Requirement, UnknownRequirement
from conformance.run.settings import Settings, UsageError
from conformance.target import Target
from conformance.verdict import Verdict


@dataclass(frozen=True, slots=True)
class Plan:
    """One case of this run.

    covers: the selected requirements that it checks.
    own: requirements that came with the case, and those that they rest on: other processes, such
        as the controller of several pytest workers, may not know them yet.
    lacks: capabilities that it needs and the target does not claim; if there are any, the case is
        a probe.
    lacks_part: whether it is about a part (such as DDP) that the target does not have at all, so
        that there is nothing to probe.
    depth: how many requirements lie below those that it covers; roots run first.
    gpus: how many devices it needs, 0 where it runs on the target's, be that the CPU.
    probed: whether it runs although the target lacks something.
    """

    covers: tuple[str, ...]
    own: tuple[Requirement, ...]
    lacks: tuple[str, ...]
    lacks_part: bool
    depth: int
    gpus: int
    probed: bool


def missing_part(target: Target, profile: str) -> str:
    """The part that the profile is about and the target does not have ("ddp"), or ""."""
    part = PART_OF_PROFILE.get(profile, "")
    return part if part and not getattr(target, part) else ""


def make_plan(item: pytest.Item, settings: Settings, *, may_probe: bool = True) -> Plan:
    """Read an item's marks. Raises UsageError for a requirement that does not exist.

    may_probe: whether ranks that a probe makes wait in vain can be replaced.
    """
    named = tuple(dict.fromkeys(_covered(item)))
    covered = tuple(id for id in named if settings.selects(id))
    adapts = item.get_closest_marker("adapts") is not None
    needed = [
        n for id in covered for n in (catalogue()[id].needs if adapts else catalogue().needs(id))
    ]
    needed += [n for mark in item.iter_markers("needs") for n in mark.args]
    lacks = settings.target.lacks(tuple(dict.fromkeys(needed)))
    gpu = item.get_closest_marker("gpu")
    return Plan(
        covers=covered,
        own=_own(item),
        lacks=lacks,
        lacks_part=any(missing_part(settings.target, catalogue()[id].profile) for id in covered),
        depth=max((catalogue().depth(id) for id in named), default=0),
        gpus=gpu.args[0] if gpu else 0,
        probed=(
            may_probe
            and item.get_closest_marker("not_probed") is None
            and NEVER_REFUSED.isdisjoint(lacks)
        ),
    )


def select(
    items: list[pytest.Item], plans: dict[str, Plan], settings: Settings
) -> list[pytest.Item]:
    """The items to run, roots first.

    A capability that the target does not claim is probed cheaply: once for each function and
    parameter, at the smallest world size of at least two ranks. It is not probed by a case that
    would take a refusal for a failure, nor if a target without it cannot refuse (`NEVER_REFUSED`).
    """
    chosen: list[pytest.Item] = []
    probes: dict[str, pytest.Item] = {}
    for item in items:
        plan = plans[item.nodeid]
        if plan.lacks_part or (settings.is_selective and not plan.covers):
            continue
        if _has_no_size(item):
            continue
        if plan.lacks and not plan.probed:
            continue
        if plan.lacks:
            key = _without_world_size(item)
            if key not in probes or (world_size_of(probes[key]) or 0) < 2:
                probes[key] = item
        else:
            chosen.append(item)
    chosen += probes.values()
    order = {item.nodeid: index for index, item in enumerate(items)}
    chosen.sort(key=lambda item: (plans[item.nodeid].depth, order[item.nodeid]))
    return chosen


def why_not_exercised(
    settings: Settings, unclaimed: Mapping[str, Sequence[str]]
) -> dict[str, tuple[Verdict, str]]:
    """For every requirement the verdict if no case of it ran, and why, as far as options tell.

    unclaimed: see `without_a_claim`.
    """
    reasons = {}
    for id, requirement in catalogue().items():
        if not settings.selects(id):
            reasons[id] = Verdict.NOT_EXERCISED, "not selected"
        elif part := missing_part(settings.target, requirement.profile):
            said = f"not claimed: the target has no {part} of its own"
            reasons[id] = Verdict.NOT_CLAIMED, said
        elif lacks := settings.target.lacks(catalogue().needs(id)):
            said = f"not claimed: it needs {', '.join(lacks)}, and cannot be probed"
            reasons[id] = Verdict.NOT_CLAIMED, said
        elif id in unclaimed:
            said = (
                f"not claimed: its cases need one of {', '.join(unclaimed[id])}, and are not probed"
            )
            reasons[id] = Verdict.NOT_CLAIMED, said
        elif settings.world_sizes is not None:
            sizes = ", ".join(map(str, settings.world_sizes))
            said = f"no case of it ran (world sizes selected: {sizes})"
            reasons[id] = Verdict.NOT_EXERCISED, said
        else:
            reasons[id] = Verdict.NOT_EXERCISED, "no case of it ran"
    return reasons


def adopt_own(item: pytest.Item) -> None:
    """Take the requirements that come with a case into the catalogue: those of its marks and of its
    module, on which those of its marks may rest.

    Raises UsageError for one whose name is taken.
    """
    module = getattr(item, "module", None)
    for requirement in [*_marked(item), *(_written(module) if module else ())]:
        try:
            catalogue().add(requirement)
        except ValueError as error:
            raise UsageError(f"{item.nodeid}: {error}") from error


def _written(module: ModuleType) -> Iterator[Requirement]:
    for value in vars(module).values():
        if isinstance(value, Requirement):
            yield value
        elif isinstance(value, Chapter):
            yield from value.rules


def _marked(item: pytest.Item) -> list[Requirement]:
    return [r for mark in item.iter_markers("covers") for r in mark.args if not isinstance(r, str)]


def _own(item: pytest.Item) -> tuple[Requirement, ...]:
    others = [r for r in _marked(item) if r.id not in rules()]
    ids = [id for r in others for id in (r.id, *catalogue().roots(r.id))]
    return tuple(catalogue()[id] for id in dict.fromkeys(ids))


def _covered(item: pytest.Item) -> list[str]:
    found = []
    for mark in item.iter_markers("covers"):
        for named in mark.args:
            id = named if isinstance(named, str) else named.id
            try:
                found.append(catalogue()[id].id)
                roots = catalogue().roots(id)
            except UnknownRequirement as error:
                raise UsageError(f"{item.nodeid}: {error.args[0]}") from error
            if id in roots:
                raise UsageError(f"{item.nodeid}: {id} rests on itself")
    return found


def world_size_of(item: pytest.Item) -> int | None:
    """The world size that an item runs with; None for one without ranks."""
    callspec = getattr(item, "callspec", None)
    size = callspec.params.get("world_size") if callspec else None
    return size if isinstance(size, int) else None


def _has_no_size(item: pytest.Item) -> bool:
    """Whether none of the case's world sizes is selected: pytest keeps an item to say so."""
    callspec = getattr(item, "callspec", None)
    return callspec is not None and not isinstance(callspec.params.get("world_size", 0), int)


def _without_world_size(item: pytest.Item) -> str:
    return item.nodeid.replace(f"ws{world_size_of(item)}", "ws")

"""One round of `ci/soak`, drawn from a seed: what all ranks run, and what befalls one of them."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass
from typing import Any

# A fault that the other ranks should not notice, but for time.
HARMLESS = ("slow", "late", "stop and continue", "store lost")
# Of the cable between two hosts, which is mended or not.
LINK_MENDED, LINK_CUT = "link cut for a while", "link cut"
# One after which every other rank should raise an error.
DEADLY = ("kill", "exit", "exception", "abort", "destroy", "stop")
# One in the making of a further group, which may fail on all ranks, but not on some alone.
SCARCE = ("no descriptors", "no memory")
KINDS = (*HARMLESS, *DEADLY, *SCARCE)
KINDS_OF_TWO_HOSTS = (*KINDS, LINK_MENDED, LINK_CUT)

OPERATIONS = (
    *("all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter", "gather", "scatter"),
    *("all_to_all", "barrier", "ring", "all_gather_object"),
)
_NUMELS = (1, 7, 1000, 60_000, 400_000)
_STEPS = (4, 12)


@dataclass(frozen=True)
class Step:
    """One call on all ranks of the world, or of all but the last.

    numel: of each rank's contribution. root: for operations that have one.
    """

    operation: str
    numel: int
    root: int
    is_async: bool
    in_subgroup: bool


@dataclass(frozen=True)
class Fault:
    """What happens to one rank.

    at: before the step of this index, or while it runs.
    after_s: None for before; else how long after the step's begin.
    """

    kind: str
    rank: int
    at: int
    after_s: float | None


@dataclass(frozen=True)
class Round:
    """A program and its fault.

    transport: of pygloo, or "" for another backend. host_count: over which the ranks are spread.
    """

    number: int
    backend: str
    transport: str
    world_size: int
    host_count: int
    steps: tuple[Step, ...]
    fault: Fault

    def to_plain(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_plain(plain: dict[str, Any]) -> Round:
        steps = tuple(Step(**step) for step in plain.pop("steps"))
        return Round(steps=steps, fault=Fault(**plain.pop("fault")), **plain)


def draw(
    seed: int, number: int, backend: str, transport: str, world_size: int, host_count: int = 1
) -> Round:
    """The round of this number. All kinds of faults take turns."""
    chance = random.Random(f"{seed} {number}")
    steps = [_step(chance, world_size) for _ in range(chance.randint(*_STEPS))]
    # Every rank needs every other one in the last step, which no fault comes after.
    steps.append(Step("all_reduce", 7, 0, is_async=False, in_subgroup=False))
    kinds = KINDS if host_count == 1 else KINDS_OF_TWO_HOSTS
    kind = kinds[number % len(kinds)]
    during = kind in ("kill", "exit", "stop", "stop and continue") and chance.random() < 0.5
    fault = Fault(
        kind,
        rank=chance.randrange(world_size),
        at=0 if kind == "late" else chance.randrange(len(steps) - 1),
        after_s=chance.choice((0.0, 0.0005, 0.003)) if during else None,
    )
    return Round(number, backend, transport, world_size, host_count, tuple(steps), fault)


def _step(chance: random.Random, world_size: int) -> Step:
    in_subgroup = world_size > 2 and chance.random() < 0.25
    return Step(
        chance.choice(OPERATIONS),
        chance.choice(_NUMELS),
        root=chance.randrange(world_size - in_subgroup),
        is_async=chance.random() < 0.3,
        in_subgroup=in_subgroup,
    )

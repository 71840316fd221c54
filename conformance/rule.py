"""Rules (requirements): fields, levels, profiles, defaults of a chapter, and a catalogue by id."""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any

PROFILES = (
    "collectives",
    "p2p",
    "objects",
    "sparse",
    "groups",
    "ddp",
    "comm_hooks",
    "checkpointing",
    "sync_batchnorm",
    "fsdp",
    "device_mesh",
    "fully_shard",
    "companions",
    "distributed_checkpoint",
    "dtensor",
    "tensor_parallel",
    "pipeline",
    "compile",
    "stores",
    "faults",
    "flight_recorder",
    "accelerator",
)

# Names of several profiles, wherever profiles are named. Each profile is in one group.
GROUPS = {
    "core": ("collectives", "p2p", "objects", "sparse", "groups", "faults", "accelerator"),
    "training": ("ddp", "comm_hooks", "checkpointing", "sync_batchnorm", "companions"),
    "sharding": (
        *("fsdp", "device_mesh", "fully_shard", "distributed_checkpoint", "dtensor"),
        "tensor_parallel",
    ),
    "tools": ("pipeline", "compile", "stores", "flight_recorder"),
}

# What profiles were called before: still understood wherever one is named.
FORMER_NAMES = {"cuda": "accelerator"}

# What these profiles say is about DDP, FSDP, SyncBatchNorm, fully_shard or a store, on whatever
# backend.
PART_OF_PROFILE = {
    "ddp": "ddp",
    "comm_hooks": "ddp",
    "checkpointing": "ddp",
    "sync_batchnorm": "sync_batchnorm",
    "fsdp": "fsdp",
    "fully_shard": "fully_shard",
    "stores": "store",
}


def profile_named(name: str) -> str:
    """The profile of this name, or of this former name. Raises ValueError if there is none."""
    found = FORMER_NAMES.get(name, name)
    if found not in PROFILES:
        raise ValueError(
            f"no profile {name!r}; there are {', '.join(PROFILES)}, and groups of them: "
            f"{', '.join(GROUPS)}"
        )
    return found


def profiles_named(text: str) -> tuple[str, ...]:
    """Of names of profiles and groups of them, with commas. Raises ValueError for what is none."""
    names = [name.strip() for name in text.split(",")]
    found = [profile_named(each) for name in names for each in GROUPS.get(name, (name,))]
    return tuple(dict.fromkeys(found))


_ID = re.compile(r"[a-z][a-z0-9_]*(/[a-z0-9][a-z0-9_.-]*)+")


class Level(str, Enum):
    """As in RFC 2119. A target that departs from a SHOULD declares a deviation with its reason."""

    MUST = "MUST"
    SHOULD = "SHOULD"
    MAY = "MAY"

    def __str__(self) -> str:
        return self.value


MUST, SHOULD, MAY = Level.MUST, Level.SHOULD, Level.MAY


@dataclass(frozen=True, slots=True, kw_only=True)
class Requirement:
    """One sentence that must hold.

    needs: capabilities such as "op:all_to_all" or "dtype:uint16", beside those that the
        requirements it rests on need; a target without them is only probed.
    rests_on: ids of requirements without which this one cannot be judged: when one of them is
        broken, this one is blocked.
    """

    id: str
    level: Level
    profile: str
    says: str
    source: str
    needs: tuple[str, ...] = ()
    rests_on: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not _ID.fullmatch(self.id):
            raise ValueError(f"id {self.id!r} is not of the form 'all_reduce/same-bits'")
        try:
            object.__setattr__(self, "profile", profile_named(self.profile))
        except ValueError as error:
            raise ValueError(f"{self.id}: {error}") from None
        if not self.says.endswith(".") or not self.source:
            raise ValueError(f"{self.id}: a requirement is a sentence with a source")

    def to_plain(self) -> dict[str, Any]:
        """As strings and lists, for certificates and for the way from a pytest worker."""
        plain = {field.name: getattr(self, field.name) for field in fields(self)}
        return {**plain, "level": str(self.level), **{k: list(plain[k]) for k in _LISTS}}

    @staticmethod
    def from_plain(plain: Mapping[str, Any]) -> Requirement:
        """The inverse of `to_plain`."""
        lists = {key: tuple(plain[key]) for key in _LISTS}
        return Requirement(**{**plain, "level": Level(plain["level"]), **lists})


_LISTS = ("needs", "rests_on")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """What the rules of a chapter have in common: each may say something else of its own."""

    profile: str
    source: str = ""
    needs: str | tuple[str, ...] = ()

    def rule(
        self,
        level: Level,
        id: str,
        says: str,
        *,
        source: str | None = None,
        needs: str | tuple[str, ...] | None = None,
        rests_on: str | tuple[str, ...] = (),
    ) -> Requirement:
        """A rule of the chapter. A single need, or a single root, is a string."""
        return Requirement(
            id=id,
            level=level,
            profile=self.profile,
            says=says,
            source=self.source if source is None else source,
            needs=_tuple(self.needs if needs is None else needs),
            rests_on=_tuple(rests_on),
        )


def _tuple(names: str | tuple[str, ...]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else names


class UnknownRequirement(LookupError):
    """An id or a pattern that names no requirement."""


class Catalogue(Mapping[str, Requirement]):
    """Requirements by id, in the order in which they were written down."""

    def __init__(self, requirements: Iterable[Requirement]) -> None:
        self._by_id: dict[str, Requirement] = {}
        for requirement in requirements:
            self.add(requirement)

    def add(self, requirement: Requirement) -> None:
        """Take in one more; the same one twice is harmless, another one of the same id is not."""
        known = self._by_id.setdefault(requirement.id, requirement)
        if known != requirement:
            raise ValueError(f"two requirements are called {requirement.id!r}")

    def __getitem__(self, id: str) -> Requirement:
        try:
            return self._by_id[id]
        except KeyError:
            raise UnknownRequirement(f"no requirement {id!r}{self._did_you_mean(id)}") from None

    def __contains__(self, id: object) -> bool:
        return id in self._by_id

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_id)

    def __len__(self) -> int:
        return len(self._by_id)

    def matching(self, pattern: str) -> list[Requirement]:
        """Those whose id matches a shell pattern ("all_reduce/*"); at least one."""
        if pattern in self._by_id:
            return [self._by_id[pattern]]
        found = [r for id, r in self._by_id.items() if fnmatch.fnmatchcase(id, pattern)]
        if not found:
            raise UnknownRequirement(
                f"no requirement matches {pattern!r}{self._did_you_mean(pattern)}"
            )
        return found

    def of_profile(self, profile: str) -> list[Requirement]:
        """Those of one profile."""
        return [r for r in self._by_id.values() if r.profile == profile]

    def depth(self, id: str) -> int:
        """How many requirements it rests on, one upon another: 0 for a root."""
        return 1 + max((self.depth(root) for root in self[id].rests_on), default=-1)

    def roots(self, id: str) -> list[str]:
        """Every requirement that this one rests on, directly or not, nearest first."""
        found: list[str] = []
        frontier = list(self[id].rests_on)
        while frontier:
            root = frontier.pop(0)
            if root not in found:
                found.append(root)
                frontier.extend(self[root].rests_on)
        return found

    def needs(self, id: str) -> tuple[str, ...]:
        """The capabilities that it and everything it rests on need, its own first."""
        return tuple(dict.fromkeys(n for one in (id, *self.roots(id)) for n in self[one].needs))

    def _did_you_mean(self, id: str) -> str:
        close = difflib.get_close_matches(id, self._by_id, n=3)
        return f"; did you mean {', '.join(close)}?" if close else ""

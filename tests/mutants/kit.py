"""How a deliberately broken target is written, and how it is shown to be rejected.

[Note: what a mutant is]
A mutant is a class that breaks exactly one thing. It is either a process group (a subclass of
`ForwardingGroup`, or of any other Python process group that takes store, rank, size and timeout),
or, if it breaks what lies above the groups, a `Patch` that changes functions while a world lives.
`@breaks` names the rule that must notice it and what the report must say. A mutant that breaks
several rules by that one thing has it several times, and stands in the chapter of the first:
`tests/mutants/ddp/join.py` breaks the rules of `conformance/spec/ddp/join.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import ClassVar, TypeVar

import torch.distributed as dist

from conformance.harness import forwarding
from conformance.power.generated_mutants import gloo_group
from conformance.target import Target, load_target
from conformance.verdict import Verdict


@dataclass(frozen=True, slots=True)
class Broken:
    """A mutant and what must be said of it.

    spec: "module:Class", by which `--target` finds it.
    requirement: the id of the requirement that it breaks.
    says: a regular expression that the report of the failing case must match.
    verdict: how it must be rejected.
    """

    spec: str
    requirement: str
    says: str
    verdict: Verdict


MUTANTS: list[Broken] = []
_SPECS: set[str] = set()  # of all mutants

F = TypeVar("F", bound="type[Mutant]")


class Mutant:
    """What every mutant has: a target that is like `base` but for one thing."""

    base: ClassVar[str] = "torch"

    @classmethod
    def target(cls) -> Target:
        """The target as `--target module:Class.target` finds it."""
        raise TypeError(f"{cls.__name__} is neither a group nor a patch")


def breaks(id: str, *, says: str, verdict: Verdict = Verdict.BROKEN) -> Callable[[F], F]:
    """Register the class as a mutant that the cases of this rule must reject."""

    def register(mutant: F) -> F:
        spec = f"{mutant.__module__}:{mutant.__qualname__}.target"
        MUTANTS.append(Broken(spec, id, says, verdict))
        if spec not in _SPECS and issubclass(mutant, dist.ProcessGroup):
            dist.Backend.register_backend(_backend(mutant), mutant, devices=["cpu"])
        _SPECS.add(spec)
        return mutant

    return register


def _backend(mutant: type) -> str:
    return f"{mutant.__module__}_{mutant.__name__}".removeprefix("tests.").replace(".", "_").lower()


# The names that torch 2.13 gave to methods of a process group, and those by which 2.11 calls them.
_FORMERLY = {
    "all_gather_single": "_allgather_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "all_to_all_single": "alltoall_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
}
_FORMER = {new: old for new, old in _FORMERLY.items() if not hasattr(dist.ProcessGroup, new)}


class GroupMutant(Mutant):
    """A process group that breaks something; mixed into the class of the group.

    It has the new names of methods; an older torch finds them by the old ones.
    """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for new, old in _FORMER.items():
            if new in vars(cls):
                setattr(cls, old, vars(cls)[new])

    @classmethod
    def target(cls) -> Target:
        return replace(
            load_target(cls.base),
            name=cls.__name__,
            backend=_backend(cls),
            imports=(*load_target(cls.base).imports, cls.__module__),
            options="",
            deviations=(),
        )


class ForwardingGroup(GroupMutant, forwarding.ForwardingGroup):
    """A group that hands everything to torch's gloo; a mutant overrides one operation."""

    def __init__(self, store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> None:
        super().__init__(rank, world_size, gloo_group(store, rank, world_size, timeout))

    def getBackendName(self) -> str:  # noqa: N802  # torch's name
        return _backend(type(self))

    def monitored_barrier(self, timeout: timedelta, wait_all_ranks: bool = False) -> None:
        """`dist.monitored_barrier` is for backends called "gloo"; cases then ask the group."""
        self.inner.monitored_barrier(timeout, wait_all_ranks=wait_all_ranks)


for _new, _old in _FORMER.items():
    setattr(ForwardingGroup, _new, getattr(forwarding.ForwardingGroup, _old))


class Patch(Mutant):
    """A mutant above the groups: `patched` is a context in which something is wrong.

    `patched` is a static context manager: it makes something wrong, and right again at its end.
    It is entered in every rank, before the default group is made.
    """

    @classmethod
    def target(cls) -> Target:
        return replace(
            load_target(cls.base),
            name=cls.__name__,
            activate=f"{cls.__module__}:{cls.__qualname__}.patched",
            deviations=(),
        )

    patched: ClassVar[Callable[[], AbstractContextManager[None]]]

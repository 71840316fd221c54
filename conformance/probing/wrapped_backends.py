"""Whether a backend wraps one of torch's built-in backends, and so may share its defects."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from conformance.harness.me import Me
from conformance.probing.calls import WORLD_SIZE
from conformance.probing.findings import Probe

_BACKEND: Any = dist.ProcessGroupGloo.__mro__[1]  # torch gives the class no public name
_GROUPS_DEEP = 2  # a wrapper, and the group that it holds


def holds_a_group_of(backend: str) -> Probe:
    """The probe of what the group is, or holds in an attribute."""
    return Probe(holds, (backend,), (True,) * WORLD_SIZE, f"no {backend} is seen in it")


def holds(me: Me, backend: str) -> bool:
    """Whether the rank's group works by this backend of torch, as far as Python can see."""
    return backend in names_of_backends(dist.group.WORLD, me.device)


def names_of_backends(thing: Any, device: torch.device, deep: int = _GROUPS_DEEP) -> Iterator[str]:
    """The names of torch's backends in a group or a backend."""
    if isinstance(thing, _BACKEND):
        yield thing.name()
    if not isinstance(thing, dist.ProcessGroup) or not deep:
        return
    for held in (_backend_of(thing, device), *getattr(thing, "__dict__", {}).values()):
        yield from names_of_backends(held, device, deep - 1)


def _backend_of(group: dist.ProcessGroup, device: torch.device) -> Any:
    try:
        return group._get_backend(device)
    except RuntimeError:  # a group in Python has none
        return None

"""Decorators (pytest marks) for cases: rules covered, world sizes, capabilities, deadline, GPUs."""

from __future__ import annotations

import pytest

from conformance.capabilities import check_capability
from conformance.rule import Requirement


def covers(*requirements: str | Requirement) -> pytest.MarkDecorator:
    """The case checks these requirements; all of them are broken when it fails.

    requirements: ids of the catalogue, or requirements of your own.
    """
    if not requirements:
        raise ValueError("covers() names at least one requirement")
    return pytest.mark.covers(*requirements)


def world_sizes(*sizes: int, at_least: int | None = None) -> pytest.MarkDecorator:
    """The case runs once for each of these world sizes.

    at_least: the case holds for every world size from this one on, and runs with all of those that
        `--world-sizes` asks for; without sizes and that option, with those up to 4.
    """
    if not sizes and at_least is None:
        raise ValueError("world_sizes() takes sizes, at_least or both")
    if any(size < 1 for size in (*sizes, at_least or 1)):
        raise ValueError(f"world sizes start at 1, got {sizes or at_least}")
    return pytest.mark.world_sizes(*sizes, at_least=at_least)


def needs(*capabilities: str) -> pytest.MarkDecorator:
    """The case can only hold for a target with these capabilities ("dtype:uint16").

    Also for one parameter alone: `pytest.param("uint16", marks=needs("dtype:uint16"))`.
    """
    for capability in capabilities:
        check_capability(capability)
    return pytest.mark.needs(*capabilities)


def adapts() -> pytest.MarkDecorator:
    """The case keeps to what the target claims.

    So it does not need the capabilities of the requirements that its own requirements rest on.
    """
    return pytest.mark.adapts()


def not_probed() -> pytest.MarkDecorator:
    """The case is left out where the target does not claim what it needs.

    For a case that cannot tell a refusal of what is not claimed from what it looks for: because it
    looks for a refusal itself, because its ranks tell each other about errors, or because it is
    torch's compiler that gives up, which it may do on some ranks alone.
    """
    return pytest.mark.not_probed()


def loses_ranks() -> pytest.MarkDecorator:
    """The case ends the processes of ranks. It is left out in a job of MPI, which would end too."""
    return pytest.mark.loses_ranks()


def deadline(seconds: float) -> pytest.MarkDecorator:
    """Each run of the case's ranks has this long, instead of `--deadline`."""
    return pytest.mark.deadline(seconds)


def gpu(devices: int = 1) -> pytest.MarkDecorator:
    """The case runs its ranks on devices of the target's type, CUDA if that is the CPU, and needs
    this many of them.
    """
    return pytest.mark.gpu(devices)


DOCUMENTED = {
    "covers": "covers(*requirements): the requirements that the case checks",
    "world_sizes": "world_sizes(*sizes, at_least=None): the world sizes that the case runs with",
    "needs": "needs(*capabilities): capabilities without which the target is only probed",
    "adapts": "adapts(): the case keeps to what the target claims",
    "not_probed": "not_probed(): left out where the target does not claim what the case needs",
    "loses_ranks": "loses_ranks(): the case ends the processes of ranks",
    "deadline": "deadline(seconds): how long each run of the ranks may take",
    "gpu": "gpu(devices): the case needs this many devices",
}

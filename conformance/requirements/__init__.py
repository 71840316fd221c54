"""The requirements, one module a profile (a large profile has one module a chapter)."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

from conformance.requirements.model import (
    MAY,
    MUST,
    PART_OF_PROFILE,
    PROFILES,
    SHOULD,
    Catalogue,
    Level,
    Requirement,
    UnknownRequirement,
    requirements_of,
)

__all__ = [
    "MAY",
    "MUST",
    "PART_OF_PROFILE",
    "PROFILES",
    "SHOULD",
    "Catalogue",
    "Level",
    "Requirement",
    "UnknownRequirement",
    "catalogue",
]


@cache
def catalogue() -> Catalogue:
    """Every requirement of the suite."""
    names = sorted(m.name for m in pkgutil.walk_packages(__path__, __name__ + "."))
    return Catalogue(r for name in names for r in requirements_of(importlib.import_module(name)))

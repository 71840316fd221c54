"""An executable specification of `torch.distributed`; exports the API for writing rules and cases.
See README.md in this folder."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from conformance.chapter import Chapter
    from conformance.checks import (
        CheckFailed,
        assert_each_rank,
        assert_same_on_all_ranks,
        assert_that,
    )
    from conformance.harness.me import Me
    from conformance.harness.ranks import Ranks
    from conformance.markers import (
        adapts,
        covers,
        deadline,
        gpu,
        loses_ranks,
        needs,
        not_probed,
        world_sizes,
    )
    from conformance.rule import Requirement

__all__ = [
    "Chapter",
    "CheckFailed",
    "Me",
    "Ranks",
    "Requirement",
    "adapts",
    "assert_each_rank",
    "assert_same_on_all_ranks",
    "assert_that",
    "covers",
    "deadline",
    "gpu",
    "loses_ranks",
    "needs",
    "not_probed",
    "world_sizes",
]

# Imported when asked for: most of them import torch, which takes a second that not every command
# needs.
_HOMES = (
    "conformance.chapter",
    "conformance.rule",
    "conformance.markers",
    "conformance.checks",
    "conformance.harness.me",
    "conformance.harness.ranks",
)


def __getattr__(name: str) -> object:
    if name in __all__:
        for home in map(importlib.import_module, _HOMES):
            if hasattr(home, name):
                found: object = getattr(home, name)
                return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

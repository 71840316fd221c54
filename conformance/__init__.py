"""An executable specification of torch's distributed semantics. See README.md in this folder."""

from conformance.checks import (
    CheckFailed,
    assert_each_rank,
    assert_same_on_all_ranks,
    assert_that,
)
from conformance.harness.me import Me
from conformance.harness.ranks import Ranks
from conformance.markers import adapts, covers, deadline, gpu, needs, not_probed, world_sizes

__all__ = [
    "CheckFailed",
    "Me",
    "Ranks",
    "adapts",
    "assert_each_rank",
    "assert_same_on_all_ranks",
    "assert_that",
    "covers",
    "deadline",
    "gpu",
    "needs",
    "not_probed",
    "world_sizes",
]

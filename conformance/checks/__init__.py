"""Comparisons of what ranks returned with what they should have returned; all pure."""

from conformance.checks.compare import Difference, first_difference, ulps_apart
from conformance.checks.ranks import (
    CheckFailed,
    assert_each_rank,
    assert_same_on_all_ranks,
    assert_that,
)

__all__ = [
    "CheckFailed",
    "Difference",
    "assert_each_rank",
    "assert_same_on_all_ranks",
    "assert_that",
    "first_difference",
    "ulps_apart",
]

"""Fixtures: the rank processes of the FSDP tests."""

from tests.impl.fsdp.conftest import four_ranks, one_rank, two_ranks

__all__ = ["four_ranks", "one_rank", "two_ranks"]

"""Asserts that each named statement in every rank's dictionary of booleans is true."""

from __future__ import annotations

from collections.abc import Sequence

from conformance import assert_that


def assert_all_true(got: Sequence[dict[str, bool]]) -> None:
    """Every rank found that each of these sentences is true.

    got: of each rank, sentence -> whether it is true there.
    """
    for rank, found in enumerate(got):
        wrong = [sentence for sentence, is_true in found.items() if not is_true]
        assert_that(not wrong, f"not true: {', '.join(wrong)}", rank)

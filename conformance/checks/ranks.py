"""Assertions for cases about the values that all ranks returned, and their error `CheckFailed`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from conformance.checks.compare import first_difference

T = TypeVar("T")

_UNSET = object()
_NAMED_MAX = 8


class CheckFailed(AssertionError):
    """The ranks returned, and what they returned is wrong. The message is the whole story.

    rank: the rank whose value is shown, or None where no single one is to blame.
    ranks: all that are wrong, as far as the case compared them.
    want: what the ranks that were compared should have returned, or a `Near` for each, if the case
        said so.
    got: what that was compared with, or with each other if `want` is None.
    within_ulps: how far apart numbers may be.
    """

    def __init__(
        self,
        message: str,
        rank: int | None = None,
        want: Sequence[object] | None = None,
        got: Sequence[object] | None = None,
        within_ulps: int = 0,
        ranks: Sequence[int] | None = None,
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.ranks = tuple(ranks if ranks is not None else () if rank is None else (rank,))
        self.want = want
        self.got = got
        self.within_ulps = within_ulps


def assert_same_on_all_ranks(
    got: Sequence[T], want: object = _UNSET, *, within_ulps: int = 0, what: str = ""
) -> None:
    """Every rank returned the same bits; and `want`, up to `within_ulps`, if it is given.

    got: one value a rank, tensors or containers of them; at least one.
    what: a word for what is compared, where the case compares several things.
    Raises CheckFailed with the first differing element.
    """
    if want is not _UNSET:
        assert_each_rank(got, [want] * len(got), within_ulps=within_ulps, what=what)
    _check_any(got)
    for rank, value in enumerate(got):
        found = first_difference(value, got[0])
        if found:
            head = f"{what + ': ' if what else ''}rank {rank} (got) and rank 0 (want) differ"
            raise CheckFailed(f"{head}\n{found}", rank, got=got)


def assert_each_rank(
    got: Sequence[object],
    want: Sequence[object],
    *,
    within_ulps: int = 0,
    what: str = "",
    ranks: Sequence[int] | None = None,
) -> None:
    """Rank r returned `want[r]`, up to `within_ulps` units in the last place.

    ranks: whose values these are, if not all ranks are judged; value i is that of rank ranks[i].
        Can be none, where what is judged happens on some ranks or on no rank.
    Raises CheckFailed with the first differing element of the first rank that differs.
    """
    if ranks is None:
        _check_any(got)
    if len(got) != len(want):
        raise ValueError(f"{len(got)} ranks returned, and {len(want)} values are expected")
    judged = range(len(want)) if ranks is None else ranks
    found = {
        rank: difference
        for rank, mine, expected in zip(judged, got, want, strict=True)
        if (difference := first_difference(mine, expected, within_ulps=within_ulps))
    }
    if found:
        head = f"{what + ': ' if what else ''}{who_is_wrong(list(found))}"
        rank = next(iter(found))
        raise CheckFailed(f"{head}\n{found[rank]}", rank, want, got, within_ulps, list(found))


def who_is_wrong(ranks: Sequence[int]) -> str:
    """ "rank 0 is wrong, and so are ranks 2, 3", of which the first is shown; of at least one."""
    first, *others = ranks
    if not others:
        return f"rank {first} is wrong"
    named = ", ".join(map(str, others[:_NAMED_MAX]))
    more = f" and {len(others) - _NAMED_MAX} more" if len(others) > _NAMED_MAX else ""
    are = "is rank" if len(others) == 1 else "are ranks"
    return f"rank {first} is wrong, and so {are} {named}{more}"


def _check_any(got: Sequence[object]) -> None:
    if not got:
        raise ValueError("no rank's value is given, so nothing would be judged")


def assert_that(holds: bool, message: str, rank: int | None = None) -> None:
    """`assert` for cases: says in words what is wrong."""
    if not holds:
        raise CheckFailed(message, rank)

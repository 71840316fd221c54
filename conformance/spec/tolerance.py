"""`assert_near`: compares each rank's tensor with its expected `Near`, within its error bound."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from conformance.checks import CheckFailed
from conformance.checks.compare import describe
from conformance.checks.ranks import who_is_wrong
from conformance.oracle.near import Near


def assert_near(
    got: Sequence[Tensor | None],
    want: Sequence[Near],
    what: str,
    ranks: Sequence[int] | None = None,
) -> None:
    """Rank r returned `want[r]`, up to the error that it allows.

    what: a word for what is compared. ranks: whose values these are, if not all are judged.
    Raises CheckFailed with the first element of the first rank that is too far off.
    """
    if len(got) != len(want):
        raise ValueError(f"{what}: {len(got)} ranks returned, and {len(want)} values are expected")
    judged = range(len(want)) if ranks is None else ranks
    compared = zip(judged, got, want, strict=True)
    found = {rank: wrong for rank, mine, near in compared if (wrong := difference(mine, near))}
    assert_nothing_found(found, what, want, got)


def assert_nothing_found(
    found: Mapping[int, str],
    what: str,
    want: Sequence[object] | None = None,
    got: Sequence[object] | None = None,
) -> None:
    """found: rank -> what is wrong there. want, got: as of `CheckFailed`."""
    if found:
        rank = next(iter(found))
        head = f"{what}: {who_is_wrong(list(found))}"
        raise CheckFailed(f"{head}\n{found[rank]}", rank, want, got, ranks=list(found))


def difference(got: Tensor | None, want: Near) -> str:
    """Where the tensor is too far off, for a report; "" where it is not."""
    wanted = want.value.to(want.dtype)
    if got is None or got.dtype != want.dtype or got.shape != want.value.shape:
        return f"got {'None' if got is None else describe(got)}, want {describe(wanted)}"
    wrong = want.off(got).nonzero()
    if not len(wrong):
        return ""
    index = tuple(wrong[0].tolist())
    allowed = want.within.expand_as(want.value)[index].item()
    return "\n".join(
        [
            f"{len(wrong)} of {got.numel()} elements are too far off, in {describe(wanted)}",
            f"  first at {list(index)}: got {got[index].item()!r}, want {wanted[index].item()!r}",
            f"  allowed error: {allowed:.2g}",
        ]
    )

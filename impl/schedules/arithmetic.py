"""Integer helpers of the schedules: rounding, offsets of blocks, log2, factors of a world size."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate


def ceil_div(value: int, by: int) -> int:
    return -(-value // by)


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is not below `value`."""
    return ceil_div(value, multiple) * multiple


def starts_of(sizes: Iterable[int]) -> list[int]:
    """Where each block begins when blocks of these sizes lie one behind the other, and the end.

    >>> starts_of([3, 0, 2])
    [0, 3, 3, 5]
    """
    return list(accumulate(sizes, initial=0))


def log2_ceil(value: int) -> int:
    """The number of doublings that take 1 to `value` or beyond: 0 for 1, 3 for 5 to 8."""
    return (value - 1).bit_length()


def factors_of(world_size: int, largest: int) -> tuple[int, ...] | None:
    """`world_size` as a product of factors from 2 to `largest`, largest first; None if impossible.

    Greedy: the largest divisor that is allowed, again and again. It fails exactly when some prime
    factor exceeds `largest`.

    >>> factors_of(24, 8), factors_of(24, 2), factors_of(1, 8)
    ((8, 3), None, ())
    """
    factors: list[int] = []
    rest = world_size
    while rest > 1:
        factor = next((f for f in range(min(largest, rest), 1, -1) if rest % f == 0), None)
        if factor is None:
            return None
        factors.append(factor)
        rest //= factor
    return tuple(factors)

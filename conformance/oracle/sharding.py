"""Expected sizes of FSDP's flat parameters: elements on each rank, and padding. Plain arithmetic,
without the target.

A unit lays its parameters out one behind another, cuts that into one chunk a rank, all of the same
size, and pads the last ones. With original parameters, each parameter begins at a multiple of 16
bytes, and the whole is a multiple of the world size (torch 2.13, `FlatParamHandle`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_ALIGNMENT_BYTES = 16


@dataclass(frozen=True, slots=True)
class FlatSizes:
    """Elements of one flat parameter.

    unpadded: of all parameters, with the gaps between them.
    chunk: of each rank's part.
    """

    unpadded: int
    chunk: int
    world_size: int

    @property
    def padded(self) -> int:
        """Elements of what an all-gather of the unit fills."""
        return self.chunk * self.world_size

    def of_rank(self, rank: int) -> int:
        """Elements of a rank's chunk that are no padding at its end."""
        return max(0, min(self.chunk, self.unpadded - rank * self.chunk))


def flat_sizes(
    numels: Sequence[int], world_size: int, *, itemsize: int = 4, orig: bool = False
) -> FlatSizes:
    """Sizes of the flat parameter of parameters with these numbers of elements, in their order.

    itemsize: bytes of an element as it is computed with.
    orig: whether original parameters are used.
    """
    unpadded = 0
    step = _ALIGNMENT_BYTES // itemsize
    for numel in numels:
        if orig:
            unpadded = _up(unpadded, step)
        unpadded += numel
    if orig:
        unpadded = _up(unpadded, world_size)
    return FlatSizes(unpadded, -(-unpadded // world_size), world_size)


def _up(number: int, step: int) -> int:
    return -(-number // step) * step

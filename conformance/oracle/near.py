"""Expected values that rounding may change: the value in float64, and the error that is allowed.

Units in the last place do not serve where large terms cancel: the result may be as small as it
likes, and its error stays that of the terms. So an oracle says for each number how far off it may
be, from the size of what it is computed from.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Near:
    """A tensor of a shape and dtype, up to an error.

    value: float64; NaN where a NaN is wanted.
    within: float64; by how much an element may differ, of a shape that broadcasts to value's.
    dtype: of the tensor that is wanted.
    """

    value: Tensor
    within: Tensor
    dtype: torch.dtype

    @staticmethod
    def relative(
        value: Tensor, within: float, dtype: torch.dtype | None = None, least: float = 0.0
    ) -> Near:
        """Within a share of the largest finite element's size, or of `least` if that is more.

        Exact for zeros if `least` is 0.
        """
        wide = value.detach().to(torch.float64)
        sizes = wide[wide.isfinite()].abs()
        largest = sizes.amax() if sizes.numel() else torch.zeros((), dtype=torch.float64)
        return Near(wide, largest.clamp(min=least) * within, dtype or value.dtype)

    def off(self, got: Tensor) -> Tensor:
        """Which elements of a tensor of this shape are too far off; a bool tensor of the shape.

        Infinities and NaN are wanted exactly, whatever `within` came to when it was computed.
        """
        wide = got.detach().cpu().to(torch.float64)
        close = self.value.isfinite() & ((wide - self.value).abs() <= self.within)
        return ~(close | (wide.isnan() & self.value.isnan()) | (wide == self.value))


def epsilon(dtype: torch.dtype) -> float:
    """The distance from 1 to the next number."""
    return torch.finfo(dtype).eps

"""A sum, random inputs and a check of sums for tests of transports, without the process group."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class TorchSum:
    """Implements `Combine`."""

    name = "sum"

    def __call__(self, accumulator: Tensor, incoming: Tensor) -> None:
        torch.add(accumulator, incoming, out=accumulator)

    def fold(self, out: Tensor, parts: Sequence[Tensor]) -> None:
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        out.copy_(total)


SUM = TorchSum()


def random_floats(seed: int, numel: int) -> Tensor:
    """Of mixed sign and size, so that the order of a sum shows in its bits."""
    generator = torch.Generator().manual_seed(1000 + seed)
    values = torch.randn(numel, generator=generator)
    return values * torch.pow(10.0, torch.randint(-3, 4, (numel,), generator=generator))


def assert_is_sum(got: Tensor, parts: Sequence[Tensor]) -> None:
    """Within what rounding in any order can do."""
    wide = torch.stack(list(parts)).double()
    assert torch.all((got.double() - wide.sum(0)).abs() <= 1e-6 * wide.abs().sum(0))

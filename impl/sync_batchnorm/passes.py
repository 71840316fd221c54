"""Interface of the per-device kernels: local moments, normalise, gradient sums, input gradient.

Two forward, two backward; passes_cpu and passes_cuda implement them. Batches (x, dy) are (N, C, *),
not empty, both contiguous or both channels-last. Vectors hold C numbers and are float64, whatever a
batch is computed in: see [Note: moments].
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from impl.sync_batchnorm import passes_cpu, passes_cuda
from impl.sync_batchnorm.moments import Moments


class Passes(Protocol):
    """The passes, for one kind of device."""

    def local_moments(self, x: Tensor) -> Moments:
        """Moments of the batch."""

    def normalise(
        self, x: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor, bias: Tensor
    ) -> Tensor:
        """(x - mean) * invstd * weight + bias, in x's type and memory format."""

    def gradient_sums(self, dy: Tensor, x: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
        """sum(dy) and sum(dy * (x - mean)) of every channel."""

    def input_gradient(
        self,
        dy: Tensor,
        x: Tensor,
        mean: Tensor,
        invstd: Tensor,
        weight: Tensor,
        mean_dy: Tensor,
        mean_product: Tensor,
    ) -> Tensor:
        """(dy - mean_dy - (x - mean) * invstd^2 * mean_product) * invstd * weight, as x."""


def passes_for(x: Tensor) -> Passes:
    """The passes for x's device."""
    return passes_cuda if x.is_cuda else passes_cpu


def memory_format(x: Tensor) -> torch.memory_format:
    """The format in which x is dense; contiguous, if it is dense in none that the passes know."""
    if not x.is_contiguous():
        for candidate in (torch.channels_last, torch.channels_last_3d):
            if x.is_contiguous(memory_format=candidate):
                return candidate
    return torch.contiguous_format

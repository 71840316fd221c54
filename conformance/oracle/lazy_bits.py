"""Tensors with the neg bit or the conj bit, whose values differ from their memory."""

from __future__ import annotations

import torch
from torch import Tensor


def with_neg_bit(values: Tensor) -> Tensor:
    """These real values, on memory that holds their negatives in every second element."""
    return torch.complex(torch.ones_like(values), -values).conj().imag


def with_conj_bit(values: Tensor) -> Tensor:
    """These complex values, on memory that holds their conjugates."""
    return values.conj().resolve_conj().conj()


def plain(x: Tensor) -> Tensor:
    """A copy of the values, on memory that holds them."""
    return x.resolve_conj().resolve_neg().clone()

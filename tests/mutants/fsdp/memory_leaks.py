"""Mutants of conformance/spec/fsdp/memory_leaks.py."""

from __future__ import annotations

import functools
from typing import Any

import torch

from impl.fsdp.step import backward
from tests.mutants.fsdp.kit import Swapped
from tests.mutants.kit import breaks

_kept: list[torch.Tensor] = []


def _and_keep(right: Any) -> Any:
    def wrong(state: Any, handle: Any) -> None:
        _kept.append(handle.flat_param.grad.clone())
        right(state, handle)

    return wrong


@breaks("fsdp/steady-memory", says="32 steps have left memory")
class KeepsGradientsThatWereReduced(Swapped):
    swaps = ((backward, "reduce_gradient", _and_keep),)


@breaks("fsdp/freed-with-the-model", says="rank 0 still has a model without references")
class AutogradKeepsTheModel(Swapped):
    """A forward without a backward leaves references to the model in autograd, as in torch
    2.13."""

    swaps = ((backward, "_weakly", lambda _: functools.partial),)

"""Parameters, gradients that are equal on all ranks, and comparisons that allow for rounding."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from conformance import Me
from conformance.checks import first_difference
from conformance.oracle.data import seeded_generator

# Kernels work on blocks of numbers, so a tensor's place in memory may decide how it is rounded.
_ROUNDING_ULPS = 16

SIZES = ((5, 3), (7,), (2, 4), (1,), (6,), (3, 3))  # of six parameters, 46 elements in all


def parameters(me: Me, sizes: Sequence[tuple[int, ...]] = SIZES, seed: int = 0) -> list[Any]:
    """Parameters in float32, the same on all ranks that ask with the same seed."""
    with seeded_generator(seed):
        return [nn.Parameter(torch.randn(size).to(me.device)) for size in sizes]


def set_gradients(params: Sequence[Any], step: int) -> None:
    """A gradient for each parameter that has to be trained; it depends on step and place alone."""
    with seeded_generator(1000 + step):
        for param in params:
            grad = torch.randn(param.shape).to(param.device)
            param.grad = grad if param.requires_grad else None


def data_of(params: Sequence[Any]) -> list[Tensor]:
    return [param.detach().clone().cpu() for param in params]


def about(what: str, got: object, want: object) -> list[str]:
    """What is found if one is not the other, but for rounding."""
    found = first_difference(got, want, within_ulps=_ROUNDING_ULPS)
    return [f"{what}: {found}"] if found else []


def quietly(call: Callable[[], Any]) -> Any:
    """What the call returns; what it warns of is left out."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return call()


def refusal(call: Callable[[], Any], kind: type[Exception]) -> str:
    """What the call says when it raises this; otherwise what happened instead, in parentheses."""
    try:
        value = quietly(call)
    except kind as error:
        return str(error)
    except Exception as error:
        return f"({type(error).__name__}: {error})"
    return f"(nothing was raised, it returned {value!r})"

"""Helpers that wrap every collective of a group at once, for mutants."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from conformance.harness.forwarding import OPERATIONS
from conformance.power.handles import Relayed
from impl.gloo import ProcessGroupGloo
from tests.mutants.kit import ForwardingGroup, GroupMutant

_WITHOUT_RESULT = ("barrier", "recv", "send")

G = TypeVar("G", bound="type[Around]")


def around_all(group: G) -> G:
    """Let all methods of a group that give a result go through its `around`."""
    for method, operation in OPERATIONS.items():
        if operation not in _WITHOUT_RESULT and hasattr(group, method):
            setattr(group, method, _through_around(getattr(group, method)))
    return group


def _through_around(right: Callable[..., Any]) -> Callable[..., Any]:
    def operation(self: Around, *args: Any) -> Any:
        return self.around(partial(right, self), *args)

    return operation


class Around:
    """The part that a mutant overrides."""

    def around(self, right: Callable[..., Any], taken: Any, *rest: Any) -> Any:
        """A collective; `right(taken, *rest)` carries it out.

        taken: the tensors that it fills: one, a list, or a list of lists. rest: those that it
        reads, if they are others, and in the end the options.
        """
        raise NotImplementedError


@around_all
class AroundTorch(Around, ForwardingGroup):
    """Around torch's gloo."""


@around_all
class AroundImpl(Around, GroupMutant, ProcessGroupGloo):
    """Around impl's, for what torch's gloo gets wrong without any mutant."""

    base = "impl"


def mapped(f: Callable[[Tensor], Tensor], tensors: Any) -> Any:
    """f of a tensor, or of each one of nested lists of them."""
    return f(tensors) if isinstance(tensors, Tensor) else [mapped(f, one) for one in tensors]


def all_of(*arguments: Any) -> list[Tensor]:
    """All tensors among the arguments of a collective, and in lists among them."""
    return [
        x
        for one in arguments
        if isinstance(one, Tensor | list | tuple)
        for x in ([one] if isinstance(one, Tensor) else all_of(*one))
    ]


Op = dist.ReduceOp


def inputs_mapped(f: Callable[[Tensor], Tensor], *rest: Any) -> list[Any]:
    """f of the tensors among these arguments of a collective; splits and options stay."""
    return [mapped(f, one) if all_of(one) else one for one in rest]


def zeros_if_expanded(x: Tensor) -> Tensor:
    shared = any(s == 0 and n > 1 for s, n in zip(x.stride(), x.shape, strict=True))
    return torch.zeros(x.shape, dtype=x.dtype) if shared else x


def without_neg_bit(x: Tensor) -> Tensor:
    """The memory, as if it held the values."""
    return torch._neg_view(x) if x.is_neg() else x


class Keeps(ForwardingGroup):
    def __init__(self, store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> None:
        super().__init__(store, rank, world_size, timeout)
        self.kept: list[Tensor] = []


def through_half(x: Tensor) -> Tensor:
    """What is left of float32 in float16."""
    return x.half().float() if x.dtype is torch.float32 else x


def through_float32(x: Tensor) -> Tensor:
    """What is left of float64 in float32."""
    return x.float().double() if x.dtype is torch.float64 else x


def lose(lossy: Any, tensors: Any) -> None:
    """In place."""
    for x in tensors:
        x.copy_(lossy(x))


class Relaying(AroundImpl):
    """Hands out handles of one class for all collectives that give a result."""

    handle: ClassVar[type[Relayed]] = Relayed

    def around(self, right: Callable[..., Any], taken: Any, *rest: Any) -> Any:
        return self.handle(right(taken, *rest))


class OfOne(ForwardingGroup):
    """Hands out handles of one class for one method of a group, if these are asynchronous."""

    method: ClassVar[str]
    handle: ClassVar[type[Relayed]] = Relayed

    def forward(self, method: str, *args: Any, **kwargs: Any) -> Any:
        work = super().forward(method, *args, **kwargs)
        options = kwargs.get("opts", args[-1] if args else None)
        is_asynchronous = getattr(options, "asyncOp", False)
        return self.handle(work) if method == self.method and is_asynchronous else work

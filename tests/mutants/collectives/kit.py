"""Helpers that wrap every collective of a group at once; functional collectives, mended."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar, TypeVar
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as functional

from conformance.harness.forwarding import OPERATIONS
from conformance.power.handles import Relayed
from impl.gloo import ProcessGroupGloo
from tests.mutants.kit import ForwardingGroup, GroupMutant, Patch

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


def _waited(x: Any) -> Tensor:
    """The values of a result, in a plain tensor."""
    found: Tensor = functional.wait_tensor(x.elem)
    return found


def _no_gradient(right: Callable[..., Any], x: Tensor, *args: Any) -> Any:
    if x.requires_grad and torch.is_grad_enabled():
        raise RuntimeError("the functional broadcast has no gradient")
    return right(x, *args)


def _permuted(right: Callable[..., Any], x: Tensor, *args: Any) -> Any:
    return right(x.flatten(), *args).view(x.shape)


def _as_reals(right: Callable[..., Any], x: Tensor, *args: Any) -> Any:
    """Complex numbers travel as rows of two."""
    if not x.is_complex():
        return right(x, *args)
    return torch.view_as_complex(functional.wait_tensor(right(torch.view_as_real(x), *args)))


def _of_a_copy(right: Callable[..., Any], xs: Any, *args: Any) -> Any:
    return right(list(xs), *args)


def _group_of(right: Callable[..., Any], group: Any, tag: str = "") -> Any:
    """Takes lists of lists and names, too, and tells which ranks have no group."""
    if isinstance(group, list) and group and isinstance(group[0], list):
        [group] = [ranks for ranks in group if dist.get_rank() in ranks]
    if isinstance(group, str) and right.__name__ == "_expand_group":
        group = dist.distributed_c10d._resolve_process_group(dist.distributed_c10d.GroupName(group))
    try:
        return right(group, tag)
    except ValueError as error:
        raise ValueError(str(error) or f"there is no group of the ranks {group}") from error


def _let_go(right: Callable[..., Any], x: Tensor) -> Any:
    """A result that is dropped is waited for, so that torch forgets it."""
    result = right(x)
    if isinstance(result, functional.AsyncCollectiveTensor):
        weakref.finalize(result, functional.wait_tensor, result.elem)
    return result


class Repaired(Patch):
    """No mutant: functional collectives that keep the rules that torch's break."""

    functions: ClassVar[dict[str, Callable[..., Any]]] = {
        "all_to_all_single": _as_reals,
        "broadcast": _no_gradient,
        "permute_tensor": _permuted,
        "reduce_scatter_tensor_coalesced": _of_a_copy,
        "_resolve_group": _group_of,
        "_expand_group": _group_of,
        "_maybe_wrap_tensor": _let_go,
    }
    methods: ClassVar[dict[str, Callable[..., Any]]] = {
        "__reduce_ex__": lambda x, protocol: _waited(x).__reduce_ex__(protocol),
        "__dlpack__": lambda x, **how: _waited(x).__dlpack__(**how),
        "share_memory_": lambda x: _waited(x).share_memory_(),
    }

    @classmethod
    @contextmanager
    def patched(cls) -> Iterator[None]:
        with ExitStack() as stack:
            for name, mended in cls.functions.items():
                new = partial(mended, getattr(functional, name))
                stack.enter_context(mock.patch.object(functional, name, new))
            for name, method in cls.methods.items():
                owner: Any = functional.AsyncCollectiveTensor
                stack.enter_context(mock.patch.object(owner, name, method, create=True))
            yield

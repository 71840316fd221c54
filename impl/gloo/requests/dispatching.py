"""Calls through torch's dispatcher, for tensor subclasses, modes, fake tensors and `torch.func`.

[Note: through the dispatcher] A group in C++ issues its operations through torch's dispatcher, as
operators `c10d::...`. Modes and subclasses take them before the kernel: a tensor subclass unwraps
its tensor (`AsyncCollectiveTensor`) or refuses (`DTensor`), a transform of `torch.func` unwraps its
own, `CommDebugMode` counts, `FakeTensorMode` and tensors on "meta" do without the operation. A
group in Python is called directly, and would take the address of memory that is not there.

So a call that has any of this to do is issued as an operator after all, through a group of torch's
own that has no backend, under a mode of ours, which is asked after all others and runs what
has remained. All other calls, which is nearly all, pay for a look at their tensors.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from impl.gloo.requests.call_hooks import CallHooks, flat
from impl.gloo.requests.validation import sign
from impl.torch_dispatch import (
    OVERRIDES_NOTHING,
    below_other_modes,
    dispatch_modes_are_active,
    group_without_backend,
    never_traced,
)

_Method = TypeVar("_Method", bound=Callable[..., dist.Work])


def bypasses_dispatcher(tensor: Tensor) -> bool:
    """Whether an operation may go to the memory of `tensor`, past the dispatcher's modes."""
    return not dispatch_modes_are_active() and _has_memory(tensor)


def _has_memory(tensor: Tensor) -> bool:
    if type(tensor).__torch_dispatch__ is not OVERRIDES_NOTHING or tensor.is_meta:
        return False
    if tensor.layout is not torch.strided:
        return True  # its values are elsewhere
    try:
        return tensor.data_ptr() != 0 or tensor.numel() == 0
    except RuntimeError:
        return False  # of a transform, which has another tensor inside


def dispatched(
    name: str, tensor_count: int, *, formerly: str = "", also: Sequence[str] = ()
) -> Callable[[_Method], _Method]:
    """Decorates what `ProcessGroup.<name>` does: its calls go through the dispatcher if they must.

    See [Note: through the dispatcher]. Compilers do not trace it.

    tensor_count: how many of its arguments, the first ones, are tensors or lists of them. formerly:
    the name that older versions of torch have. also: other keywords for these arguments, in their
    order; torch's short forms have them.
    """
    here = name if hasattr(dist.ProcessGroup, name) else formerly

    def decorate(method: _Method) -> _Method:
        keywords = list(inspect.signature(method).parameters)[1 : tensor_count + 1]
        by_place = [set(names) for names in zip(keywords, also or keywords, strict=True)]

        @functools.wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> dist.Work:
            hooks: CallHooks = self.call_hooks
            if hooks.is_empty:
                return issued(self, *args, **kwargs)
            if kwargs:
                args = args + _taken(by_place[len(args) :], kwargs)
            return hooks.around(
                lambda: issued(self, *args, **kwargs),
                name,
                args[:tensor_count],
                args[tensor_count:],
                kwargs,
            )

        def issued(self: Any, *args: Any, **kwargs: Any) -> dist.Work:
            try:
                if kwargs:
                    args = args + _taken(by_place[len(args) :], kwargs)
                tensors = args[:tensor_count]
                if not dispatch_modes_are_active() and all(map(_has_memory, flat(tensors))):
                    return method(self, *args, **kwargs)
                lowest = _LowestMode(
                    lambda tensors: method(self, *tensors, *args[tensor_count:], **kwargs),
                    tensor_count,
                )
                issue = getattr(group_without_backend(self.rank(), self.size()), here)
                with below_other_modes(lowest):
                    work: dist.Work = issue(*_without_none(args), **kwargs)
            except (RuntimeError, TypeError, ValueError) as error:
                sign(error, method.__name__, self)
                raise
            return work if lowest.work is None else lowest.work

        return cast(_Method, never_traced(call))

    return decorate


def _taken(by_place: Sequence[set[str]], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """What `kwargs` held for these places, up to the first that it has nothing for."""
    taken: list[Any] = []
    for names in by_place:
        given = names & kwargs.keys()
        if len(given) != 1:
            break
        taken.append(kwargs.pop(given.pop()))
    return tuple(taken)


def _without_none(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Drops trailing defaults, which are None here: torch's own class does not take None."""
    while args and args[-1] is None:
        args = args[:-1]
    return args


class _LowestMode(TorchDispatchMode):
    """Runs one call of a group once its operator has passed all other modes."""

    def __init__(self, run: Callable[[Sequence[Any]], dist.Work], tensor_count: int) -> None:
        """run: is given what the operator's first `tensor_count` arguments are."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.work: dist.Work | None = None
        self._run = run
        self._tensor_count = tensor_count

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        is_for_us = func.namespace == "c10d" and not dispatch_modes_are_active()
        arguments = args[: self._tensor_count]
        tensors = list(flat(arguments))
        if not is_for_us or any(tensor.is_meta for tensor in tensors):
            return func(*args, **(kwargs or {}))
        if types:
            return NotImplemented
        # of tensors in lists of lists the dispatcher does not ask the types
        arguments = tree_map_only(AsyncCollectiveTensor, _waited, arguments)
        for tensor in flat(arguments):
            if not _has_memory(tensor):
                raise RuntimeError(
                    f"ProcessGroupGloo: {func} needs tensors with memory, but one of shape "
                    f"{tuple(tensor.shape)} has none (its storage was freed, or it is a wrapper)"
                )
        self.work = self._run(arguments)
        boxed = self.work.boxed()
        return boxed if len(func._schema.returns) == 1 else (args[0], boxed)


def _waited(tensor: AsyncCollectiveTensor) -> Tensor:
    inner: Tensor = tensor.trigger_wait()
    return inner

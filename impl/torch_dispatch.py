"""Wrappers of torch's private names for dispatch modes, `torch.func` transforms and dynamo.

Checked with torch 2.13.0, 2.11.0 and 2.15.0.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

_NOTHING_TO_LEAVE = contextlib.nullcontext()

OVERRIDES_NOTHING: Any = torch._C._disabled_torch_dispatch_impl  # `__torch_dispatch__` of Tensor


def transforms_are_active() -> bool:
    """Whether this thread is inside a transform of `torch.func`: grad, jvp, vmap and the like."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def outside_transforms() -> contextlib.AbstractContextManager[Any]:
    """Until left, no transform of `torch.func` sees what happens: new tensors are plain ones."""
    return temporarily_clear_interpreter_stack() if transforms_are_active() else _NOTHING_TO_LEAVE


def dispatch_modes_are_active() -> bool:
    """Whether a `TorchDispatchMode` sees what this thread does.

    Not counting one that stands for a device (its class says so, `simulates_a_device`): it has to
    see what an operation does to memory.
    """
    if not torch._C._len_torch_dispatch_stack():
        return False
    modes = _get_current_dispatch_mode_stack()
    return not all(getattr(mode, "simulates_a_device", False) for mode in modes)


def group_without_backend(rank: int, world_size: int) -> dist.ProcessGroup:
    """torch's own class, whose methods issue operators."""
    make: Any = dist.ProcessGroup  # the stubs know one of its constructors
    group: dist.ProcessGroup = make(rank, world_size)
    return group


@contextlib.contextmanager
def below_other_modes(mode: TorchDispatchMode) -> Iterator[None]:
    """`mode` is active, and is asked after the modes that are already.

    Not after those of tracing (fake tensors, proxies): torch asks these after all others.
    """
    above = [
        other
        for other in _get_current_dispatch_mode_stack()
        if getattr(other, "_mode_key", None) is None
    ]
    for _ in above:
        _pop_mode()
    try:
        with mode:
            for other in above:
                _push_mode(other)
            try:
                yield
            finally:
                for _ in above:
                    _pop_mode()
    finally:
        for other in above:
            _push_mode(other)


def not_a_frame(function: F) -> F:
    """Keeps dynamo from compiling calls of a function; a trace may still go into it."""
    eval_frame = torch._C._dynamo.eval_frame
    skip = eval_frame._FrameAction.SKIP
    strategy = eval_frame._FrameExecStrategy(skip, skip)
    eval_frame.set_code_exec_strategy(function.__code__, strategy)
    return function


def never_traced(function: F) -> F:
    """Keeps dynamo away from a function and all that it calls, at no cost for its callers.

    `torch.compiler.disable` would load dynamo and wrap each call. The attribute ends a graph that
    comes here, the strategy lets the interpreter run what then comes.
    """
    not_a_frame(function)
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = None  # type: ignore[attr-defined]
    return function


class _SkippedMethod:
    """A method that dynamo must not trace. Finds out at each access whether there is a dynamo.

    Loading dynamo takes a second, and before that nothing is compiled. A wrapping
    function could not look this up: it would be a frame that dynamo traces.
    """

    def __init__(self, function: Callable[..., Any], with_callees: bool) -> None:
        self.__doc__ = function.__doc__
        self._function = function
        self._with_callees = with_callees
        self._disabled: Callable[..., Any] | None = None

    # Dynamo would compile it for one method, and then call the code for others too.
    @not_a_frame
    def __get__(self, instance: Any, owner: type) -> Callable[..., Any]:
        if instance is None:
            return self._function
        if "torch._dynamo" not in sys.modules:
            return types.MethodType(self._function, instance)
        if self._disabled is None:
            self._disabled = torch.compiler.disable(self._function, recursive=self._with_callees)
        return types.MethodType(self._disabled, instance)


def skipped_by_dynamo(*, with_callees: bool) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Decorates a method that must run as it is under `torch.compile`.

    Args:
        with_callees: whether that also holds for what it calls; else that may be compiled.
    """

    def decorate(function: Callable[..., T]) -> Callable[..., T]:
        return cast(Callable[..., T], _SkippedMethod(function, with_callees))

    return decorate

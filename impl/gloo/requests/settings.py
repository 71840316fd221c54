"""Options of a call (op, root, timeout, async): torch's option objects and short forms as one type.

Torch's process groups take an options object (`AllreduceOptions` and so on) or, in the short forms,
a root, an operation or a timeout in its place. Here they become one value.
"""

from __future__ import annotations

import functools
from datetime import timedelta
from typing import Any, NamedTuple, SupportsIndex

from torch.distributed import ReduceOp

from impl.gloo.requests import validation
from impl.gloo.requests.reduce_ops import AnyReduceOp

Timeout = timedelta | float  # a float counts seconds, as for all of torch's functions in C++


class CallSettings(NamedTuple):
    """Defaults are torch's."""

    op: AnyReduceOp = ReduceOp.SUM
    root: int = 0
    root_tensor: int = 0
    timeout_s: float | None = None  # None: the group's
    asynchronous: bool = True


def own_timeout_s(timeout: Timeout | None) -> float | None:
    """None unless the call has a timeout of its own: torch says "unset" with -1 ms.

    Raises TypeError for what is no timeout.
    """
    if timeout is None:
        return None
    if isinstance(timeout, timedelta):
        timeout = timeout.total_seconds()
    elif not isinstance(timeout, float):
        raise TypeError(f"a timeout is a timedelta, or seconds as a float, not {timeout!r}")
    return timeout if timeout > 0 else None


def settings(
    opts: Any = None,
    *,
    root: SupportsIndex | None = None,
    op: AnyReduceOp | None = None,
    timeout: Timeout | None = None,
) -> CallSettings:
    """`opts` is an options object, or what a short form has in its place.

    Raises TypeError for anything else.
    """
    if opts is None:
        return CallSettings(
            op=ReduceOp.SUM if op is None else op,
            root=0 if root is None else validation.integer("the root", root),
            timeout_s=own_timeout_s(timeout),
        )
    if isinstance(opts, timedelta):
        return settings(root=root, op=op, timeout=opts)
    if isinstance(opts, (ReduceOp, ReduceOp.RedOpType)):
        return settings(root=root, op=opts, timeout=timeout)
    if _is_integer(opts.__class__):
        return settings(root=opts, op=op, timeout=timeout)
    has_op, has_root, has_root_tensor, has_async = _attributes(opts.__class__)
    return CallSettings(
        opts.reduceOp if has_op else ReduceOp.SUM,
        opts.rootRank if has_root else 0,
        opts.rootTensor if has_root_tensor else 0,
        own_timeout_s(opts.timeout),
        opts.asyncOp if has_async else True,
    )


@functools.cache
def _is_integer(kind: type) -> bool:
    """Python's own, numpy's, or a tensor."""
    return hasattr(kind, "__index__")


@functools.cache
def _attributes(kind: type) -> tuple[bool, bool, bool, bool]:
    """Which attributes an options class has. `hasattr` is slow on an object that lacks one."""
    if not hasattr(kind, "timeout"):
        raise TypeError(
            f"expected options, a root, an operation or a timeout, not {kind.__name__!r}"
        )
    return (
        hasattr(kind, "reduceOp"),
        hasattr(kind, "rootRank"),
        hasattr(kind, "rootTensor"),
        hasattr(kind, "asyncOp"),
    )

"""Cached choice of the reduction for a call's op and dtype, with its signature to compare on ranks.

Answers are kept: programs reduce the same few shapes again and again, and to work one out takes
longer than a small all_reduce.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from impl.gloo.queue.issuing import Described, joined
from impl.gloo.requests import validation
from impl.gloo.requests.reduce_ops import AnyReduceOp, Reduction, check_complex, reduction

_KEPT_MAX = 4096


@functools.lru_cache(maxsize=_KEPT_MAX)
def choose(
    method: str,
    op: AnyReduceOp,
    dtype: torch.dtype,
    shape: torch.Size,
    extra: str,
    widens: bool = True,
) -> tuple[Reduction, Described]:
    """The reduction, and how it is described. Raises what `reduction` raises."""
    if dtype.is_complex:
        check_complex(method, op)
    chosen = reduction(op, dtype.to_real() if dtype.is_complex else dtype, widens)
    plain = validation.plain_dtype(dtype)
    signature = f"op={chosen.op_name} dtype={plain} numel={shape.numel()}{extra}"
    return chosen, Described(signature, f"{chosen.op_name} {plain} {tuple(shape)}{extra}")


def choose_each(
    method: str, op: AnyReduceOp, tensors: Sequence[Tensor], widens: bool
) -> tuple[list[Reduction], Described]:
    """Each tensor's reduction, and how all of them are described in one call."""
    each = [choose(method, op, tensor.dtype, tensor.shape, "", widens) for tensor in tensors]
    return [chosen for chosen, _ in each], joined(described for _, described in each)


# What `choose` says of an all_reduce, by the operation's hash, which is its kind's number: a
# look-up by the operation itself takes four microseconds more.
_all_reduces: dict[tuple[int, torch.dtype, torch.Size], tuple[Reduction, Described]] = {}


def choose_all_reduce(op: ReduceOp, tensor: Tensor) -> tuple[Reduction, Described]:
    """The same for one tensor, at less cost."""
    key = hash(op), tensor.dtype, tensor.shape
    known = _all_reduces.get(key)
    if known is None:
        if len(_all_reduces) >= _KEPT_MAX:
            _all_reduces.clear()
        known = _all_reduces[key] = choose("all_reduce", op, tensor.dtype, tensor.shape, "")
    return known

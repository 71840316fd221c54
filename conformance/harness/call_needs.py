"""The capabilities (operation, dtype, reduce op) that a call of `torch.distributed` needs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from conformance.capabilities import DTYPES, OPS, REDUCE_OPS

# Functions of torch.distributed -> the operation that a backend has for them.
_OP_OF = {
    **{op: op for op in OPS},
    "all_gather_coalesced": "all_gather",
    "all_gather_single": "all_gather_into_tensor",
    "all_reduce_coalesced": "all_reduce",
    "batch_isend_irecv": "send",
    "irecv": "send",
    "isend": "send",
    "recv": "send",
    "reduce_scatter_single": "reduce_scatter_tensor",
}
_REDUCTIONS = frozenset({"all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor"})


def needs_of_call(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[str, ...]:
    """Such as ("dtype:int64", "op:all_reduce", "reduce_op:max"), sorted.

    name: of a function of `torch.distributed`; () for one that is made of others, such as
        all_gather_object.
    """
    op = _OP_OF.get(name)
    if op is None:
        return ()
    values = [*args, *kwargs.values()]
    dtypes = {str(t.dtype).removeprefix("torch.") for t in _tensors(values)}
    reduce_ops = {_name_of(value) for value in values} & {*REDUCE_OPS}
    if op in _REDUCTIONS and not reduce_ops:
        reduce_ops = {"sum"}
    needs = [f"op:{op}"]
    needs += [f"dtype:{dtype}" for dtype in dtypes & {*DTYPES}]
    needs += [f"reduce_op:{reduce_op}" for reduce_op in reduce_ops]
    return tuple(sorted(needs))


def _tensors(values: Sequence[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, dist.P2POp):
            yield value.tensor
        elif isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _name_of(value: object) -> str:
    """Of a reduction, in lower case; "" for everything else."""
    if not isinstance(value, dist.ReduceOp | dist.ReduceOp.RedOpType):
        return ""
    return next(name for name in REDUCE_OPS if value == getattr(dist.ReduceOp, name.upper()))

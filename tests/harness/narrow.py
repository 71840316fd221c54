"""Targets whose backend claims few capabilities, and raises for everything else on every rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from conformance.capabilities import Capabilities
from conformance.harness.forwarding import OPERATIONS
from conformance.target import Target, load_target
from tests.mutants.kit import ForwardingGroup

Op = dist.ReduceOp

CLAIMED = Capabilities(
    ops=frozenset({"all_reduce", "broadcast", "all_gather", "barrier", "send"}),
    dtypes=frozenset({"float32", "float64", "int64"}),
    reduce_ops=frozenset({"sum", "max"}),
    features=frozenset({"sequence_numbers", "timeouts"}),
)

_OPS = CLAIMED.ops | {"recv"}
_DTYPES = frozenset(getattr(torch, name) for name in CLAIMED.dtypes)


def _tensors(arguments: Any) -> Iterator[Tensor]:
    """All of the arguments of an operation, those in lists included."""
    for one in arguments:
        if isinstance(one, Tensor):
            yield one
        elif isinstance(one, list | tuple):
            yield from _tensors(one)


def _is_claimed(op: Any) -> bool:
    return bool(op == Op.SUM or op == Op.MAX)


class NarrowGroup(ForwardingGroup):
    """torch's gloo, as far as `CLAIMED` goes."""

    def forward(self, method: str, *args: Any, **kwargs: Any) -> Any:
        operation = OPERATIONS[method]
        if operation not in _OPS:
            raise NotImplementedError(f"narrow has no {operation}")
        for x in _tensors(args):
            if x.dtype not in _DTYPES:
                raise TypeError(f"narrow has no {x.dtype}")
            if x.is_sparse:
                raise TypeError("narrow has no sparse tensors")
        if operation == "all_reduce" and not _is_claimed(args[1].reduceOp):
            raise ValueError(f"narrow has no {args[1].reduceOp}")
        if method == "recv_anysource":
            raise NotImplementedError("narrow needs a source")
        return super().forward(method, *args, **kwargs)

    def monitored_barrier(self, timeout: timedelta, wait_all_ranks: bool = False) -> None:
        raise NotImplementedError("narrow has no monitored_barrier")


dist.Backend.register_backend("narrow", NarrowGroup, devices=["cpu"])


def narrow() -> Target:
    """The target; what it inherits of torch's gloo it declares as torch's gloo does."""
    base = load_target("torch")
    return replace(
        base,
        name="narrow",
        backend="narrow",
        imports=(__name__,),
        capabilities=CLAIMED,
    )


def narrowest() -> Target:
    """The same group, of which no feature is claimed: it has no sequence numbers, for example."""
    return replace(narrow(), capabilities=replace(CLAIMED, features=frozenset()))

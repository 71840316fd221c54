"""Targets of gloo without one operation, dtype or reduction, which raises and is not claimed.

    python -m conformance certify --target tests.zoo.lacking:without_send

A rule that turns red on one of these asks for something that it does not say it needs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from conformance.capabilities import OPS, REDUCE_OPS
from conformance.harness.forwarding import OPERATIONS
from conformance.target import Target, load_target
from tests.mutants.kit import ForwardingGroup

_DTYPES = ("bool", "uint8", "int8", "int32", "int64", "float16", "bfloat16", "float64", "complex64")
_SAME = {"recv": "send", "all_gather_into_tensor_coalesced": "all_gather_into_tensor"}


class LackingGroup(ForwardingGroup):
    """gloo, which refuses what a subclass names.

    lacks: an operation, a dtype or a reduction, by its name in the vocabulary of capabilities.
    """

    lacks = ""

    def forward(self, method: str, *args: Any, **kwargs: Any) -> Any:
        operation = OPERATIONS[method].removesuffix("_coalesced")
        dtypes = {str(x.dtype).removeprefix("torch.") for x in _tensors(args)}
        reductions = {
            str(o.reduceOp.op.name).lower()
            for o in args
            if isinstance(getattr(o, "reduceOp", 0), dist.ReduceOp)
        }
        if self.lacks in {_SAME.get(operation, operation), *dtypes, *reductions}:
            raise NotImplementedError(f"there is no {self.lacks} here")
        return super().forward(method, *args, **kwargs)

    def monitored_barrier(self, timeout: timedelta, wait_all_ranks: bool = False) -> None:
        if self.lacks == "monitored_barrier":
            raise NotImplementedError("there is no monitored_barrier here")
        super().monitored_barrier(timeout, wait_all_ranks)


def _tensors(arguments: Any) -> Iterator[torch.Tensor]:
    for one in arguments:
        if isinstance(one, torch.Tensor):
            yield one
        elif isinstance(one, list | tuple):
            yield from _tensors(one)


def _target(name: str) -> Target:
    backend = f"zoo_without_{name}"
    group = type(f"Without_{name}", (LackingGroup,), {"lacks": name, "__module__": __name__})
    dist.Backend.register_backend(backend, group, devices=["cpu"])
    gloo = load_target("torch")
    claims = gloo.capabilities
    return replace(
        gloo,
        name=f"without-{name}",
        backend=backend,
        imports=(__name__,),
        capabilities=replace(
            claims,
            ops=claims.ops - {name},
            dtypes=claims.dtypes - {name},
            reduce_ops=claims.reduce_ops - {name},
        ),
    )


NAMES = tuple(f"without_{name}" for name in (*OPS, *_DTYPES, *REDUCE_OPS[:-1]))
for _name in NAMES:
    globals()[_name] = _target(_name.removeprefix("without_"))

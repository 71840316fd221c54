"""The arithmetic of each ReduceOp on each dtype.

    dtype                 SUM, PRODUCT             MIN, MAX   BAND, BOR, BXOR   AVG
    float32, float64      in the type              NaN wins   refused           SUM, then divided
    float16, bfloat16,    in float32,              NaN wins   refused           all in float32
      float8                rounded once
    integers              wrap                     exact      bitwise           in int64, truncated
    bool                  or, and                  and, or    bitwise           refused
    complex               SUM as pairs of reals,   refused    refused           as pairs of reals
                            PRODUCT refused

AVG of integers truncates towards zero, like C and NCCL; narrow ones are summed in int64 first, so
that the mean of values that fit is right (100, 100, 100 in uint8 is 100, not 14). PREMUL_SUM is
NCCL's own.

In a group with C++ ranks everything travels in its own type, and is rounded at each step: that is
what the other ranks expect.

Refusals keep the exception types and the words of torch's gloo.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.distributed import ReduceOp

from impl.transport import lent
from impl.transport.base import Combine

_Binary = Callable[..., Any]  # binary(a, b, out=out)
AnyReduceOp: TypeAlias = "ReduceOp | ReduceOp.RedOpType"  # torch takes either everywhere

NARROW_FLOATS = frozenset(
    dtype
    for name in (
        "float16",
        "bfloat16",
        "float8_e4m3fn",
        "float8_e4m3fnuz",
        "float8_e5m2",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
    )
    if (dtype := getattr(torch, name, None)) is not None
)
_FLOATS = NARROW_FLOATS | {torch.float32, torch.float64}
_TORCH_ADDS = {torch.float16, torch.bfloat16}  # narrow, but torch's own kernels take them
# torch has these dtypes, but few kernels; two's complement arithmetic has no sign
_UNSIGNED_AS_SIGNED = {
    torch.uint16: torch.int16,
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
}
_INTEGERS = frozenset(
    {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, *_UNSIGNED_AS_SIGNED}
)
_BITWISE = frozenset({"band", "bor", "bxor"})

_TORCH_BINARY: dict[str, _Binary] = {
    "sum": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}
_BOOL_BINARY: dict[str, _Binary] = {
    "sum": torch.logical_or,
    "product": torch.logical_and,
    "min": torch.logical_and,
    "max": torch.logical_or,
    "band": torch.logical_and,
    "bor": torch.logical_or,
    "bxor": torch.logical_xor,
}
_OP_NAMES: dict[ReduceOp.RedOpType, str] = {
    ReduceOp.SUM: "sum",
    ReduceOp.AVG: "avg",
    ReduceOp.PRODUCT: "product",
    ReduceOp.MIN: "min",
    ReduceOp.MAX: "max",
    ReduceOp.BAND: "band",
    ReduceOp.BOR: "bor",
    ReduceOp.BXOR: "bxor",
}


class _Native:
    """A kernel does it, in the dtype itself."""

    def __init__(self, name: str, binary: _Binary) -> None:
        self.name = name
        self._binary = binary

    def __call__(self, accumulator: Tensor, incoming: Tensor) -> None:
        self._binary(accumulator, incoming, out=accumulator)

    def fold(self, out: Tensor, parts: Sequence[Tensor]) -> None:
        if len(parts) == 1:
            out.copy_(parts[0])
            return
        self._binary(parts[0], parts[1], out=out)
        for part in parts[2:]:
            self._binary(out, part, out=out)


class _Widened:
    """In float32, rounded once at the end. Exact for min and max."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._binary = _TORCH_BINARY[name]

    def __call__(self, accumulator: Tensor, incoming: Tensor) -> None:
        self.fold(accumulator, (accumulator, incoming))

    def fold(self, out: Tensor, parts: Sequence[Tensor]) -> None:
        if len(parts) == 1:
            out.copy_(parts[0])
            return
        if len(parts) == 2 and out.dtype in _TORCH_ADDS:
            # one operation on these types is float32 arithmetic with one rounding already
            self._binary(parts[0], parts[1], out=out)
            return
        wide = parts[0].to(torch.float32)
        for part in parts[1:]:
            self._binary(wide, part.to(torch.float32), out=wide)
        out.copy_(wide)


class _Reinterpreted:
    """Unsigned integers as signed ones of the same width: the same bits come out."""

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.name = name
        self._dtype = dtype
        self._native = _Native(name, _TORCH_BINARY[name])

    def __call__(self, accumulator: Tensor, incoming: Tensor) -> None:
        self._native(accumulator.view(self._dtype), incoming.view(self._dtype))

    def fold(self, out: Tensor, parts: Sequence[Tensor]) -> None:
        self._native.fold(out.view(self._dtype), [part.view(self._dtype) for part in parts])


class _InNumpy:
    """Comparisons of wide unsigned integers, for which torch has no kernel."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._binary = np.minimum if name == "min" else np.maximum

    def __call__(self, accumulator: Tensor, incoming: Tensor) -> None:
        self.fold(accumulator, (accumulator, incoming))

    def fold(self, out: Tensor, parts: Sequence[Tensor]) -> None:
        target = out.numpy()
        target[...] = functools.reduce(self._binary, [part.numpy() for part in parts])


@dataclass(frozen=True, slots=True)
class Reduction:
    """One ReduceOp on one dtype."""

    op_name: str  # "avg"; what the caller asked for
    combine: Combine  # what travels is combined with this
    is_average: bool
    staging_dtype: torch.dtype | None  # averages of narrow types travel in a wider one

    @property
    def is_in_place(self) -> bool:
        """Whether what travels is the tensor itself, and comes back as the result."""
        return not self.is_average and self.staging_dtype is None

    def stage(self, flat: Tensor) -> Tensor:
        """What travels instead of `flat`; a new tensor if it is of another dtype."""
        return flat if self.staging_dtype is None else flat.to(self.staging_dtype)

    def conclude(self, reduced: Tensor, out: Tensor, world_size: int) -> None:
        """out = the result, from what came back. `reduced` may be `out`, and is overwritten."""
        if self.is_average:
            lent.check(reduced)
            _divide(reduced, world_size)
        if reduced is not out:
            lent.check(out)
            out.copy_(reduced)


def _divide(tensor: Tensor, world_size: int) -> None:
    """In place; integers are truncated towards zero."""
    if tensor.dtype in _FLOATS:
        tensor.div_(world_size)
    elif tensor.dtype == torch.uint64:
        values = tensor.numpy()
        values //= np.uint64(world_size)
    else:
        torch.div(tensor, world_size, rounding_mode="trunc", out=tensor)


@functools.lru_cache(maxsize=512)
def reduction(op: AnyReduceOp, dtype: torch.dtype, widens: bool = True) -> Reduction:
    """How to reduce tensors of a real dtype, in a wider one where the table says so.

    Raises RuntimeError, in the words of torch's gloo, for what cannot be done.
    """
    name = op_name(op)
    if dtype not in _FLOATS | _INTEGERS | {torch.bool}:
        raise RuntimeError(f"Invalid scalar type: {name} of {_plain(dtype)} is not supported")
    if name in _BITWISE and dtype in _FLOATS:
        raise RuntimeError(
            f"Cannot use ReduceOp.{name.upper()} with non-integral dtype {_plain(dtype)}"
        )
    if name != "avg":
        return Reduction(name, _combine(name, dtype, widens), False, None)
    if dtype == torch.bool:
        raise RuntimeError("Cannot use ReduceOp.AVG with dtype bool: a mean is not a truth value")
    staging = None
    if widens and dtype in NARROW_FLOATS:
        staging = torch.float32
    elif widens and dtype in _INTEGERS - {torch.int64, torch.uint64}:
        staging = torch.int64
    return Reduction(name, _combine("sum", staging or dtype, widens), True, staging)


def op_name(op: AnyReduceOp) -> str:
    """`sum` and so on; RuntimeError for PREMUL_SUM and for what is no operation."""
    kind: Any = getattr(op, "op", op)  # a ReduceOp knows its kind; a kind is one already
    name = _OP_NAMES.get(kind)
    if name is not None:
        return name
    if kind == ReduceOp.PREMUL_SUM:
        raise RuntimeError(
            "Cannot use ReduceOp.PREMUL_SUM with Gloo: scale the tensor, then use ReduceOp.SUM"
        )
    raise RuntimeError(f"Unhandled ReduceOp {op}")


def check_complex(operation: str, op: AnyReduceOp) -> None:
    """Raises ValueError, in torch's words, for what complex numbers have no meaning for."""
    if op_name(op) not in ("sum", "avg"):
        raise ValueError(
            f"{operation} does not support ReduceOp.{op_name(op).upper()} on complex tensors"
        )


def _combine(name: str, dtype: torch.dtype, widens: bool) -> Combine:
    if dtype == torch.bool:
        return _Native(name, _BOOL_BINARY[name])
    if dtype in NARROW_FLOATS and (widens or dtype not in _TORCH_ADDS):
        return _Widened(name)
    if dtype in _UNSIGNED_AS_SIGNED:
        if name in ("min", "max"):
            return _InNumpy(name)
        return _Reinterpreted(name, _UNSIGNED_AS_SIGNED[dtype])
    return _Native(name, _TORCH_BINARY[name])


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

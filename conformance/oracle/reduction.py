"""Expected results of reductions, exact or with error bounds. Pure: numpy, no ranks.

[Note: which results are exact]
Integers and bool have one right result, also where it wraps around. MIN, MAX and the bitwise
operations do not round. A floating-point SUM, PRODUCT or AVG depends on the order, so it is exact
only for contributions as `oracle.data` makes them; for others `rounded` says how far off any order
may be.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from conformance.oracle.near import Near

Array = npt.NDArray[Any]

ORDERED = ("min", "max")
BITWISE = ("band", "bor", "bxor")


def is_defined(op: str, dtype: str) -> bool:
    """Whether the reduction has a meaning for this dtype.

    Complex numbers have no order and, in torch, no product across ranks; floating-point numbers
    have no bits to combine; a bool has no average.
    """
    kind = getattr(torch, dtype)
    if kind.is_complex:
        return op in ("sum", "avg", "premul_sum")
    if kind.is_floating_point:
        return op not in BITWISE
    if kind is torch.bool:
        return op not in ("avg", "premul_sum")
    return True


def reduced(op: str, contributions: Sequence[Tensor]) -> Tensor:
    """All contributions, of one shape and dtype, as one.

    AVG of integers is cut towards zero. A bool SUM is true where any contribution is.
    """
    first = contributions[0]
    stacked = np.stack([_as_array(c) for c in contributions])
    if first.dtype is torch.bool:
        result = _of_bools(op, stacked)
    elif op == "avg":
        result = _average(stacked)
    else:
        result = _PLAIN[op].reduce(stacked, axis=0, dtype=stacked.dtype)
    return torch.from_numpy(np.asarray(result)).to(first.dtype).reshape(first.shape)


def rounded(op: str, contributions: Sequence[Tensor]) -> Near:
    """A SUM, PRODUCT or AVG of floating-point tensors, up to what their own arithmetic may be off.

    Each operation is off by at most half a unit in the last place of its result, and no partial sum
    is greater than the sum of absolute values. n-1 additions or multiplications make a SUM or a
    PRODUCT; an AVG also rounds 1/n, and multiplies by it, before or after. One operation more makes
    up for products of errors. Here the same operations are done in float64, which rounds as well.
    Complex tensors are taken as real ones with a dimension more.
    """
    parts = [torch.view_as_real(c) if c.is_complex() else c for c in contributions]
    stacked = torch.stack([p.detach().to(torch.float64) for p in parts])
    count = len(parts)
    if op == "product":
        value = stacked.prod(0)
        size = value.abs()
    else:
        divisor = count if op == "avg" else 1
        value, size = stacked.sum(0) / divisor, stacked.abs().sum(0) / divisor
    operations = count + 2 if op == "avg" else count
    info, own = torch.finfo(parts[0].dtype), torch.finfo(torch.float64)
    within = operations * (size * (info.eps + own.eps) / 2 + info.smallest_normal)
    return Near(value, within, parts[0].dtype)


_PLAIN: dict[str, np.ufunc] = {
    "sum": np.add,
    "product": np.multiply,
    "min": np.minimum,  # a NaN on any side is the result
    "max": np.maximum,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
}


def _as_array(tensor: Tensor) -> Array:
    """numpy's own dtype where it has one; float64 for the narrow floats, which it lacks."""
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype.is_floating_point and tensor.dtype.itemsize < 4:
        tensor = tensor.to(torch.float64)
    array: Array = tensor.numpy()
    return array


def _of_bools(op: str, stacked: Array) -> Array:
    if op in ("sum", "max", "bor"):
        return np.asarray(stacked.any(axis=0))
    if op in ("product", "min", "band"):
        return np.asarray(stacked.all(axis=0))
    return np.asarray(np.logical_xor.reduce(stacked, axis=0))


def _average(stacked: Array) -> Array:
    count = len(stacked)
    if np.issubdtype(stacked.dtype, np.integer):
        total = stacked.astype(object).sum(axis=0)
        cut = np.frompyfunc(lambda t: t // count if t >= 0 else -(-t // count), 1, 1)
        return np.asarray(cut(total)).astype(stacked.dtype)
    wide = np.complex128 if np.iscomplexobj(stacked) else np.float64
    return np.asarray(stacked.astype(wide).sum(axis=0) / count)

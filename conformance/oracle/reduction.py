"""What a reduction of several contributions must give. Pure: numpy, no ranks.

[Note: which results are exact]
Integers and bool have one right result, also where it wraps around. MIN, MAX and the bitwise
operations do not round. A floating-point SUM or PRODUCT depends on the order, so it is exact only
for contributions as `oracle.data` makes them; for others `sum_error_bound` says how far off any
order may be.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

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


def sum_error_bound(contributions: Sequence[Tensor]) -> Tensor:
    """How far a SUM may be from the exact one, element by element, in float64.

    Each of n-1 additions in the tensors' own dtype is off by at most half a unit in the last place
    of a partial sum, and no partial sum is greater than the sum of absolute values.
    """
    total = torch.stack([c.to(torch.float64).abs() for c in contributions]).sum(0)
    info = torch.finfo(contributions[0].dtype)
    return len(contributions) * (total * info.eps / 2 + info.smallest_normal)


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

"""Compares two values: where they first differ, and by how much. Pure: no ranks, no groups."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass

import numpy as np
import torch
from torch import Tensor

# Integers of the same width, to count units in the last place of a floating-point number.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_FEW_ULPS = 1000

_BRIEF = 300  # characters of a value that is shown beside the difference

# Layout -> the methods that give the plain tensors which a tensor of it consists of.
_PARTS = {
    torch.sparse_coo: ("indices", "values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}


@dataclass(frozen=True, slots=True)
class Difference:
    """One place in which two values differ.

    where: the way to it, such as "[1]['weight']", and "" for the values themselves.
    """

    where: str
    what: str

    def __str__(self) -> str:
        return f"at {self.where}: {self.what}" if self.where else self.what


def first_difference(
    got: object, want: object, *, within_ulps: int = 0, where: str = ""
) -> Difference | None:
    """The first difference between two values, which may be containers of tensors; None if equal.

    Tensors are equal when dtype, shape, layout and all elements are. A NaN equals any NaN, and 0.0
    does not equal -0.0. Mappings are equal when their keys also have the same order.

    within_ulps: how many units in the last place two numbers may be apart.
    where: the way to these values, for the `Difference`.
    """
    if isinstance(want, Tensor) and isinstance(got, Tensor):
        return _tensor_difference(got, want, within_ulps, where)
    if type(got) is not type(want):
        return Difference(where, f"got {_kind(got)}, want {_kind(want)}")
    if is_dataclass(want) and not isinstance(want, type):
        got = {f.name: getattr(got, f.name) for f in fields(want)}
        want = {f.name: getattr(want, f.name) for f in fields(want)}
    if isinstance(want, Mapping) and isinstance(got, Mapping):
        if list(got) != list(want):
            what = f"got keys {list(got)}, want {list(want)}"
            unwanted = (f"; [{key!r}] is {_brief(got[key])}" for key in got if key not in want)
            return Difference(where, what + next(unwanted, ""))
        pairs = [(f"[{key!r}]", got[key], want[key]) for key in want]
    elif (
        isinstance(want, Sequence)
        and isinstance(got, Sequence)
        and not isinstance(want, str | bytes)
    ):
        if len(got) != len(want):
            what = f"got {len(got)} values, want {len(want)}"
            if not want:
                what += f"; the first is {_brief(got[0])}"
            return Difference(where, what)
        pairs = [(f"[{i}]", g, w) for i, (g, w) in enumerate(zip(got, want, strict=True))]
    else:
        same = _are_equal(got, want)
        return None if same else Difference(where, f"got {shown(got)}, want {shown(want)}")
    for step, g, w in pairs:
        found = first_difference(g, w, within_ulps=within_ulps, where=where + step)
        if found:
            return found
    return None


def _are_equal(got: object, want: object) -> bool:
    """Whether two values of one type that are no containers are equal, or both NaN."""
    if isinstance(got, np.ndarray) and isinstance(want, np.ndarray):
        if got.dtype != want.dtype or got.shape != want.shape:
            return False
        return bool(np.all((got == want) | ((got != got) & (want != want))))
    return bool(got == want or (got != got and want != want))


def ulps_apart(got: Tensor, want: Tensor) -> Tensor:
    """How many units in the last place lie between, element by element; both of one real dtype.

    Neighbouring numbers are 1 apart; integers and bool, as much as they differ.
    Returns float64, since two numbers may be further apart than an int64 can say; infinite where
    only one of the two is NaN.
    """
    if not got.dtype.is_floating_point:
        apart = (got.to(torch.float64) - want.to(torch.float64)).abs().clamp(min=1)
        return torch.where(got == want, 0.0, apart)  # neighbours above 2**53 are equal as float64
    mine, wanted = _order(got), _order(want)
    # Exact on one side of zero, where the difference cannot overflow; across it either both are
    # small enough for float64, or the distance is so large that its last digits do not matter.
    near = (mine - wanted).to(torch.float64)
    far = mine.to(torch.float64) - wanted.to(torch.float64)
    distance = torch.where((mine < 0) == (wanted < 0), near, far).abs()
    distance[got.isnan() != want.isnan()] = float("inf")
    distance[got.isnan() & want.isnan()] = 0
    return distance


def _order(x: Tensor) -> Tensor:
    """Position of each number among all numbers of its dtype; -0.0 comes just before 0.0."""
    bits = x.contiguous().view(_BITS[x.dtype.itemsize])
    if x.dtype.itemsize == 1:
        signed = bits.to(torch.int64)
        signed = torch.where(signed >= 128, 127 - signed, signed)
    else:
        wide = bits.to(torch.int64)
        smallest = torch.iinfo(bits.dtype).min
        signed = torch.where(wide < 0, smallest - wide - 1, wide)
    return signed


def _tensor_difference(
    got: Tensor, want: Tensor, within_ulps: int, where: str
) -> Difference | None:
    if got.is_nested and want.is_nested:  # their sizes have names, which differ
        return first_difference(
            got.unbind(), want.unbind(), within_ulps=within_ulps, where=where + ".unbind()"
        )
    if (
        got.is_nested != want.is_nested
        or got.dtype != want.dtype
        or got.shape != want.shape
        or got.layout != want.layout
    ):
        return Difference(where, f"got {describe(got)}, want {describe(want)}")
    if got.is_meta and want.is_meta:
        return None  # without elements
    if got.is_quantized and want.is_quantized:
        return _tensor_difference(
            got.dequantize(), want.dequantize(), within_ulps, where + ".dequantize()"
        )
    if got.is_sparse:
        got, want = got.coalesce(), want.coalesce()
    for part in _PARTS.get(got.layout, ()):
        ulps = within_ulps if part == "values" else 0
        mine, wanted = (getattr(tensor, part)() for tensor in (got, want))
        found = _tensor_difference(mine, wanted, ulps, f"{where}.{part}()")
        if found:
            return found
    if got.layout in _PARTS:
        return None
    if got.dtype.is_complex:
        return _tensor_difference(
            torch.view_as_real(got.resolve_conj()),
            torch.view_as_real(want.resolve_conj()),
            within_ulps,
            where + ".as_real()",
        )
    got, want = got.detach().cpu(), want.detach().cpu()
    bits = _BITS[want.dtype.itemsize]
    if torch.equal(got.contiguous().view(bits), want.contiguous().view(bits)):
        return None  # as nearly always, and far quicker than what follows
    apart = ulps_apart(got, want)
    wrong = (apart > within_ulps).nonzero()
    if not len(wrong):
        return None
    index: tuple[int, ...] = tuple(wrong[0].tolist())
    lines = [
        f"{len(wrong)} of {got.numel()} elements differ, in {describe(want)}",
        f"  first at {list(index)}: got {_number(got[index])}, want {_number(want[index])}",
    ]
    if got.dtype.is_floating_point:
        distance = apart[index].item()
        few = f"{distance:.0f} units in the last place"
        limit = f" (allowed: {within_ulps} units in the last place)" if within_ulps else ""
        error = few if distance <= _FEW_ULPS else _error(got[index].item(), want[index].item())
        lines.append(f"  error: {error}{limit}")
    return Difference(where, "\n".join(lines))


def describe(tensor: Tensor) -> str:
    """ "float32 (4, 8)", with the layout if it is not strided."""
    layout = "" if tensor.layout is torch.strided else f" {str(tensor.layout).split('.')[1]}"
    shape = f"({tensor.size(0)}, nested)" if tensor.is_nested else tuple(tensor.shape)
    return f"{str(tensor.dtype).removeprefix('torch.')} {shape}{layout}"


def shown(value: object, show: Callable[[object], str] = repr) -> str:
    """The value as Python shows it, or its type if it does not let itself be shown."""
    try:
        return show(value)
    except Exception:
        return object.__repr__(value)


def _kind(value: object) -> str:
    return (
        describe(value) if isinstance(value, Tensor) else f"{type(value).__name__} {shown(value)}"
    )


def _brief(value: object) -> str:
    text = _kind(value)
    return text if len(text) <= _BRIEF else text[: _BRIEF - 3] + "..."


def _number(x: Tensor) -> str:
    # Through Python's float, which prints enough digits to tell neighbours apart; float64 has them.
    return repr(x.item())


def _error(got: float, want: float) -> str:
    """How far off a number is, where counting its neighbours in between would say little."""
    relative = f", {abs(got - want) / abs(want):.2g} relative" if want else ""
    return f"{abs(got - want):.3g} absolute{relative}"

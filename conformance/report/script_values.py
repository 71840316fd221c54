"""Writes values as Python source: readable where that is exact, and pickled where it is not."""

from __future__ import annotations

import base64
import io
import math
import pickle
import textwrap
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from datetime import timedelta
from enum import Enum
from types import EllipsisType, FunctionType, NoneType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from conformance.oracle.near import Near
from conformance.report.script_source import CannotStandAlone, Sources

_READABLE_NUMEL = 64
_COLUMNS = 88


def in_lines(before: str, items: Sequence[str], after: str) -> str:
    """Items between brackets: in one line, or in several of which each has what fits into it."""
    line = f"{before}{', '.join(items)}{after}"
    if not items or (len(line) <= _COLUMNS and "\n" not in line):
        return line
    lines = [""]
    for item in items:
        if lines[1:] and "\n" not in lines[-1] + item and len(lines[-1] + item) < _COLUMNS:
            lines[-1] += f", {item}"
        else:
            lines.append(item)
    text = textwrap.indent(",\n".join(lines[1:]), "    ")
    return f"{before}\n{text},\n{after.lstrip(',')}"


class Values:
    """Writes values; what their classes and functions need is asked of `sources`."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources

    def text(self, value: object) -> str:
        """An expression for the value. Raises CannotStandAlone."""
        return self._simple(value) or self._container(value) or self._pickled(value)

    def _simple(self, value: object) -> str:
        kind = type(value)
        if kind in (bool, int, str, bytes, NoneType):
            return repr(value)
        if kind is float:
            return repr(value) if math.isfinite(value) else f'float("{value}")'  # type: ignore[arg-type]  # it is one
        if isinstance(value, complex):
            return f"complex({self.text(value.real)}, {self.text(value.imag)})"
        if isinstance(value, EllipsisType):
            return "..."
        if isinstance(value, torch.dtype | torch.layout):
            return str(value)
        if isinstance(value, torch.device):
            return f'torch.device("{value}")'
        if isinstance(value, dist.ReduceOp.RedOpType):
            return f"dist.ReduceOp.{value.name}"
        if isinstance(value, timedelta):
            self._sources.imports.add("from datetime import timedelta")
            return f"timedelta(seconds={value.total_seconds()!r})"
        if isinstance(value, Enum):
            return f"{self._sources.need(kind)}[{value.name!r}]"
        if isinstance(value, FunctionType | type):
            return self._sources.need(value)
        if isinstance(value, Tensor):
            return self._tensor(value)
        return ""

    def _container(self, value: object) -> str:
        kind = type(value)
        if kind is list:
            return in_lines("[", self._items(value), "]")
        if kind is tuple:
            items = self._items(value)
            return in_lines("(", items, ",)") if len(items) == 1 else in_lines("(", items, ")")
        if kind in (set, frozenset):
            return in_lines(f"{kind.__name__}([", self._items(sorted(value, key=repr)), "])")  # type: ignore[call-overload]  # it is one
        if kind is torch.Size:
            return in_lines("torch.Size([", self._items(value), "])")
        if kind is dict and isinstance(value, Mapping):
            pairs = [f"{self.text(k)}: {self.text(v)}" for k, v in value.items()]
            return in_lines("{", pairs, "}")
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return in_lines(f"{self._sources.need(kind)}(", self._items(value), ")")
        if self._sources.is_given(kind) and kind is not Near:
            raise CannotStandAlone(f"one of its arguments is a {kind.__name__} of the harness")
        if is_dataclass(value) and all(field.init for field in fields(value)):
            named = [f"{f.name}={self.text(getattr(value, f.name))}" for f in fields(value)]
            return in_lines(f"{self._sources.need(kind)}(", named, ")")
        return ""

    def _items(self, values: Any) -> list[str]:
        return [self.text(value) for value in values]

    def _tensor(self, tensor: Tensor) -> str:
        """The tensor as numbers, or "" where that would be long, or not the same."""
        if (
            type(tensor) is not Tensor
            or tensor.numel() > _READABLE_NUMEL
            or tensor.layout is not torch.strided
            or tensor.device.type != "cpu"
            or tensor.requires_grad
            or tensor.is_conj()
            or tensor.is_neg()
            or not tensor.is_contiguous()
            or tensor.untyped_storage().nbytes() != tensor.numel() * tensor.itemsize
        ):
            return ""
        if not tensor.numel():
            return f"torch.empty({tuple(tensor.shape)}, dtype={tensor.dtype})"
        numbers = tensor.tolist()
        # NaN has many bit patterns, and only one of them is written as `float("nan")`.
        same = torch.tensor(numbers, dtype=tensor.dtype)
        if not torch.equal(_bits(same), _bits(tensor)):
            return ""
        return in_lines("torch.tensor(", [self.text(numbers), f"dtype={tensor.dtype}"], ")")

    def _pickled(self, value: object) -> str:
        try:
            data = pickle.dumps(value)
        except Exception as error:  # classes may raise whatever they like while being pickled
            raise CannotStandAlone(
                f"a {type(value).__name__} cannot be pickled: {error}"
            ) from error
        for module in _Modules.of(data):
            if self._sources.is_copied(module):
                raise CannotStandAlone(f"a {type(value).__name__} is made of parts of {module}")
        self._sources.imports |= {"import base64", "import pickle", "import zlib"}
        # Not by textwrap, which takes minutes for a few megabytes.
        encoded = base64.b64encode(zlib.compress(data)).decode()
        starts = range(0, len(encoded), _COLUMNS)
        text = "\n".join(f'    "{encoded[i : i + _COLUMNS]}"' for i in starts)
        return f"pickle.loads(zlib.decompress(base64.b64decode(\n{text}\n)))"


def _bits(tensor: Tensor) -> Tensor:
    return tensor.flatten().view(torch.uint8)


class _Modules(pickle.Unpickler):
    """Notes from which modules pickled data takes its classes and functions."""

    @classmethod
    def of(cls, data: bytes) -> set[str]:
        reader = cls(io.BytesIO(data))
        reader.seen = set()
        reader.load()
        return reader.seen

    seen: set[str]

    def find_class(self, module: str, name: str) -> Any:
        self.seen.add(module)
        return super().find_class(module, name)

"""Restricted pickling of a rank's results: which values its parent gets, and reading them safely.

A rank runs the target's code, which may be broken or worse, and can write any bytes to its parent:
nothing of it is run here. Plain values, tensors, arrays, records and exceptions are copied; any
other value stays in its rank, and the parent gets a `Described` in its place.
"""

from __future__ import annotations

import collections
import copyreg
import io
import pickle
import sys
import weakref
from collections.abc import Callable
from dataclasses import is_dataclass
from datetime import datetime, timedelta
from enum import Enum
from pathlib import PosixPath, PurePosixPath
from types import FunctionType, ModuleType
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from conformance.checks.compare import shown
from conformance.harness.messages import ByValue, device_named, find_function, from_bits
from conformance.torch_private import (
    check_sparse_tensors,
    is_rebuilding,
    storage_of_bytes,
    without_attributes,
)


class Described:
    """Stands for a value that has stayed in its rank, and equals no other value."""

    def __init__(self, type_name: str, text: str) -> None:
        self.type_name = type_name
        self.text = text

    def __repr__(self) -> str:
        return self.text


# Callables that build a value from their arguments and have no other effect.
_MAKERS = {
    id(maker)  # as an arbitrary object may have no hash
    for maker in (
        *(set, frozenset, bytearray, complex, slice, range),
        *(collections.OrderedDict, collections.Counter, collections.deque, collections.defaultdict),
        *(timedelta, datetime, PosixPath, PurePosixPath),
        *(torch.Size, torch.device, dist.ReduceOp, dist.ReduceOp.RedOpType),
        *(storage_of_bytes, from_bits, device_named, Described),
    )
}
_CONSTANTS = (torch.dtype, torch.layout, torch.memory_format, torch.qscheme)
_FACTORIES = (int, float, str, list, dict, set)  # of a defaultdict
_CASES = "conformance.spec."  # whose classes are as much to be trusted as the cases
_OF_NUMPY = ("_frombuffer", "_reconstruct", "scalar", "dtype", "ndarray")


def pack_for_parent(value: object) -> bytes:
    """The value as bytes that `unpack_from_rank` reads. Raises what the value's own code raises."""
    buffer = io.BytesIO()
    _Describing(buffer, pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


def unpack_from_rank(data: bytes) -> Any:
    """The inverse of `pack_for_parent`. Raises UnpicklingError for what does not come from it."""
    try:
        value = _Reader(io.BytesIO(data)).load()
        check_sparse_tensors()
        return value
    except pickle.UnpicklingError:
        raise
    except Exception as error:  # what is no pickle fails in many ways
        raise pickle.UnpicklingError(f"{type(error).__name__}: {error}") from error


class _Describing(ByValue):
    """Puts a `Described` in the place of what the parent would not read."""

    def reducer_override(self, obj: object) -> Any:
        if obj is find_function or _is_readable(obj):
            return NotImplemented
        if isinstance(obj, type):
            return _described(obj)
        if isinstance(obj, Enum):  # Python 3.11.0 to 3.11.3 would have `getattr` called
            return type(obj), (obj._value_,)
        try:
            reduced = super().reducer_override(obj)
            if reduced is not NotImplemented:
                return reduced
            reduced = obj.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        except (TypeError, AttributeError, pickle.PicklingError):  # it has none
            return _described(obj)
        if isinstance(reduced, str):
            return _described(obj)
        reduced = without_attributes(reduced)
        maker, args = reduced[:2]
        if maker in (copyreg.__newobj__, copyreg.__newobj_ex__):  # type: ignore[attr-defined]  # no stub
            maker = args[0]
        return reduced if _may_make(maker) else _described(obj)


def _described(obj: object) -> Any:
    return Described, (f"{type(obj).__module__}.{type(obj).__qualname__}", shown(obj))


def _is_readable(found: Any) -> bool:
    """Whether it may come by its name."""
    if isinstance(found, _CONSTANTS):
        return True
    if not callable(found):
        return False
    return _may_make(found) or any(found is factory for factory in _FACTORIES)


def _may_make(maker: Any) -> bool:
    """Whether calling it, with whatever arguments, makes a value and does nothing else."""
    if id(maker) in _MAKERS:
        return True
    if isinstance(maker, type):
        seen, is_plain = _KINDS_SEEN.get(id(maker), _UNSEEN)
        if seen() is not maker:
            is_plain = _is_plain_kind(maker)
            _KINDS_SEEN[id(maker)] = weakref.ref(maker), is_plain
        return is_plain
    return is_rebuilding(maker) or _is_of_numpy(maker)


# Makers that go through their arguments, as far as they reach.
_OF_ELEMENTS = (
    *(set, frozenset, bytearray, torch.Size),
    *(collections.OrderedDict, collections.Counter, collections.deque, collections.defaultdict),
)

# id of a class, which may have no hash -> a weak reference to it, and whether it is a plain one.
_KINDS_SEEN: dict[int, tuple[Callable[[], type | None], bool]] = {}
_UNSEEN = (lambda: None, False)


def _is_plain_kind(kind: type) -> bool:
    """Whether its instances are records, enum members, exceptions, numpy's, or values of cases."""
    if is_dataclass(kind) or issubclass(kind, Enum | Exception):
        return True
    is_named_tuple = issubclass(kind, tuple) and hasattr(kind, "_fields")
    return is_named_tuple or kind.__module__.startswith(_CASES) or _is_of_numpy(kind)


def _is_of_numpy(maker: Any) -> bool:
    module = getattr(maker, "__module__", None) or ""
    return module.partition(".")[0] == "numpy" and getattr(maker, "__name__", "") in _OF_NUMPY


_InPython: Any = pickle._Unpickler  # where each call can be looked at before it is made
_NEVER_WRITTEN = (pickle.INST, pickle.OBJ, pickle.EXT1, pickle.EXT2, pickle.EXT4)


class _Reader(_InPython):  # type: ignore[misc]  # its stub lacks what is replaced
    """Reads what `_Describing` writes."""

    dispatch: ClassVar[dict[int, Any]] = {
        code: load
        for code, load in _InPython.dispatch.items()
        if bytes([code]) not in _NEVER_WRITTEN
    }

    def find_class(self, module: str, name: str) -> Any:
        """What is loaded here already; nothing is imported."""
        found = _loaded(module, name)
        if found is find_function or _is_readable(found):
            return found
        raise pickle.UnpicklingError(f"{module}.{name} is no part of plain data")

    def load_reduce(self) -> None:
        maker, args = self.stack[-2:]
        if maker is find_function:
            self.stack[-2:] = [_known(*args)]
            return
        self._check(maker)
        if any(maker is one for one in _OF_ELEMENTS) and _is_short_for_many(args):
            raise pickle.UnpicklingError(f"{maker} would be made of a range, however long that is")
        super().load_reduce()

    def load_newobj(self) -> None:
        self._check(self.stack[-2])
        super().load_newobj()

    def load_newobj_ex(self) -> None:
        self._check(self.stack[-3])
        super().load_newobj_ex()

    def load_build(self) -> None:
        # a member of an Enum is the parent's own, such as a verdict
        if isinstance(self.stack[-2], type | FunctionType | ModuleType | Enum):
            raise pickle.UnpicklingError(f"{self.stack[-2]} would be changed")
        super().load_build()

    dispatch[pickle.REDUCE[0]] = load_reduce
    dispatch[pickle.NEWOBJ[0]] = load_newobj
    dispatch[pickle.NEWOBJ_EX[0]] = load_newobj_ex
    dispatch[pickle.BUILD[0]] = load_build

    @staticmethod
    def _check(maker: Any) -> None:
        if not _may_make(maker):
            raise pickle.UnpicklingError(f"{maker} would be called")


def _is_short_for_many(args: tuple[Any, ...]) -> bool:
    """Whether a few bytes may stand for more elements than there is memory or time for."""
    return any(isinstance(arg, range) for arg in args) or (len(args) == 1 and type(args[0]) is int)


def _loaded(module: str, name: str) -> Any:
    """What has this name in a module that is loaded already, or None."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def _known(ref: Any) -> FunctionType:
    """The function of this reference, if its module is loaded already."""
    found = _loaded(ref.module, ref.qualname)
    if not isinstance(found, FunctionType):
        raise pickle.UnpicklingError(f"there is no function {ref.qualname} in {ref.module} here")
    return found

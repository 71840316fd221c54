"""Watches a rank's torch calls for features that its device lacks, such as dtypes or streams.

What is asked for may be asked by a case, by torch or by the target's wrappers, at any place. So the
calls of torch are watched, but only on devices that lack something. That an operator is missing,
torch says by itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from conformance.harness import devices
from conformance.harness.outcome import Lacking, Refusal, message_of, type_name

# Methods that name a dtype and take none.
_DTYPES = {"double": "float64", "cdouble": "complex128", "cfloat": "complex64", "half": "float16"}
_ATTRIBUTES = {
    **dict.fromkeys(("Stream", "stream", "current_stream", "set_stream"), "device:streams"),
    "Event": "device:events",
}
_PINNED = "device:pinned_memory"
_RESIZED = "device:resizable_storage"
_MOVED = "device:moved_data"
_OPERATOR = re.compile(r"aten::\w+")


@contextmanager
def watching(type: str, lacks: Sequence[str], tell: Callable[[Refusal], None]) -> Iterator[None]:
    """Inside, a call of torch that raises is told if it asks for what the device lacks.

    type: of the device.
    lacks: capabilities, as `devices.lacks` gives them.
    tell: is told what raised and what it needs.

    Raises LacksOperator for torch's error of an operator that the device does not have.
    """
    try:
        with _watching_calls(type, lacks, tell) if lacks else nullcontext():
            yield
    except NotImplementedError as error:
        if type != devices.HOST and (found := _OPERATOR.search(str(error))):
            raise LacksOperator(f"the device {type!r} has no operator {found[0]}") from error
        raise


@contextmanager
def _watching_calls(
    type: str, lacks: Sequence[str], tell: Callable[[Refusal], None]
) -> Iterator[None]:
    watch = _Watch(lacks, tell)
    storage: Any = torch.UntypedStorage
    storage.resize_ = _watched_resize(watch, storage.resize_)
    try:
        with watch:
            yield
    except AttributeError as error:
        if error.obj is devices.module_of(type):
            need = _ATTRIBUTES.get(str(error.name), "")
            watch.note(f"torch.{type}.{error.name}", error, (need,))
        raise
    finally:
        del storage.resize_  # that of its base is the original


class LacksOperator(Lacking):
    """An operator of torch's that the device does not have."""


class _Watch(TorchFunctionMode):
    def __init__(self, lacks: Sequence[str], tell: Callable[[Refusal], None]) -> None:
        super().__init__()
        self._lacks = frozenset(lacks)
        self._tell = tell

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        try:
            return func(*args, **kwargs)
        except Exception as error:
            self._note_if_lacking(func, args, kwargs, error)
            raise

    def _note_if_lacking(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], error: Exception
    ) -> None:
        name = getattr(func, "__name__", str(func))
        asked = {*_dtypes((*args, *kwargs.values())), f"dtype:{_DTYPES.get(name, '')}"}
        if name == "pin_memory" or kwargs.get("pin_memory") or "PinnedMemory" in str(error):
            asked.add(_PINNED)
        if func == torch.Tensor.data.__set__:  # type: ignore[attr-defined]  # a descriptor
            asked.add(_MOVED)
        self.note(name, error, asked)

    def note(self, name: str, error: Exception, asked: Iterable[str]) -> None:
        """What raised, if any of that which it asked for is lacking."""
        if needs := self._lacks.intersection(asked):
            first = f"{type_name(type(error))}: {message_of(error)}".splitlines()[0]
            self._tell(Refusal(f"{name} raised {first}", tuple(sorted(needs))))


def _watched_resize(watch: _Watch, resize: Callable[..., Any]) -> Callable[..., Any]:
    """`UntypedStorage.resize_`, which is no function that a mode sees."""

    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        try:
            return resize(storage, size)
        except Exception as error:
            watch.note("resize_ of a storage", error, (_RESIZED,))
            raise

    return resize_


def _dtypes(values: Sequence[Any]) -> Iterator[str]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield _need(value.dtype)
        elif isinstance(value, torch.dtype):
            yield _need(value)
        elif isinstance(value, list | tuple):
            yield from _dtypes(value)


def _need(dtype: torch.dtype) -> str:
    return f"dtype:{str(dtype).removeprefix('torch.')}"

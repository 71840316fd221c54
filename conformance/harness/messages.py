"""Commands and answers between a parent and a rank, and how functions and tensors are pickled.

Everything travels by value, through plain pickling into bytes. torch's own reducers for
multiprocessing share memory with the sender instead, which is gone when a rank is.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import pickle
import sys
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch.storage import TypedStorage

from conformance.checks.compare import shown
from conformance.harness.outcome import NOTHING_REFUSED, Refusal
from conformance.target import Target
from conformance.torch_private import bytes_of_storage, storage_of_bytes


@dataclass(frozen=True, slots=True)
class FunctionRef:
    """A function that the receiver can find by itself.

    path: the module's file, from which it is loaded where its name does not lead to it.
    """

    module: str
    qualname: str
    path: str


@dataclass(frozen=True, slots=True)
class Join:
    """Become one rank of a fresh world.

    prefix: where this world lives in the store; no two worlds share one.
    default_group: whether to call `init_process_group`.
    """

    target: Target
    rank: int
    world_size: int
    host: str
    port: int
    prefix: str
    seed: int
    group_timeout_s: float
    default_group: bool
    device: str
    search_path: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Prepare:
    """Import what the target needs, before any world: all ranks do it at the same time."""

    target: Target
    search_path: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Call:
    """Run a function in the world that was joined; `payload` is `(function, args)`."""

    payload: bytes


@dataclass(frozen=True, slots=True)
class Leave:
    """Destroy every group, put the process back as it was, and say what could not be."""


@dataclass(frozen=True, slots=True)
class End:
    """End the process as Python ends, so that libraries can do what they do then."""


@dataclass(frozen=True, slots=True)
class Begun:
    """What `Join` and `Call` need has been imported. Their time runs from here on."""


@dataclass(frozen=True, slots=True)
class Done:
    """The answer to `Join` and `Call`. `payload` is the value.

    refused: as of `Returned`.
    """

    payload: bytes
    refused: Refusal = NOTHING_REFUSED


@dataclass(frozen=True, slots=True)
class Failed:
    """The answer to `Join` and `Call` when an exception came instead."""

    type_name: str
    message: str
    traceback: str
    bases: tuple[str, ...]
    refused: Refusal = NOTHING_REFUSED
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Lost:
    """The answer to `Call` when the function or its value could not travel."""

    message: str


@dataclass(frozen=True, slots=True)
class Left:
    """The answer to `Leave`.

    leaks: groups that are still there, and what else went wrong, one phrase each.
    held: what the process holds now and did not before, such as "thread 'poller'".
    changed: how the process is set up otherwise than before, such as "signal handlers".
    """

    leaks: tuple[str, ...]
    held: tuple[str, ...]
    changed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Garbled:
    """In place of an answer: what came is none, and nothing that comes after it can be trusted."""

    message: str


Command = Prepare | Join | Call | Leave | End
Answer = Done | Failed | Lost | Left | Garbled


# torch's pickling outside of torch.save goes by typed storages, which these dtypes do not have.
_WITHOUT_STORAGE_TYPE = frozenset(
    getattr(torch, name)
    for name in dir(torch)
    if name in ("uint16", "uint32", "uint64", "complex32") or name.startswith("float8_")
)


def from_bits(bits: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return bits.view(dtype).reshape(shape)


def device_named(type: str, index: int | None) -> torch.device | str:
    """The device, or its name in a process that does not know the type."""
    try:
        return torch.device(type) if index is None else torch.device(type, index)
    except RuntimeError:
        return type if index is None else f"{type}:{index}"


class ByValue(pickle.Pickler):
    """Pickles tensors of any device as CPU tensors, without memory shared with the sender.

    Equal values give equal bytes, which is how a run is recognised. torch's own reducer of a
    storage writes its address too.
    """

    def reducer_override(self, obj: object) -> Any:
        if isinstance(obj, TypedStorage):
            data = bytes_of_storage(obj)
            return NotImplemented if data is None else (storage_of_bytes, (data, obj.dtype))
        if isinstance(obj, FunctionType) and obj is not find_function:
            return find_function, (reference_to(obj),)
        if isinstance(obj, torch.device):
            return device_named, (obj.type, obj.index)
        if isinstance(obj, torch.Tensor) and obj.device.type not in ("cpu", "meta"):
            obj = obj.detach().cpu()
            if obj.dtype not in _WITHOUT_STORAGE_TYPE:
                return obj.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        if isinstance(obj, torch.Tensor) and obj.dtype in _WITHOUT_STORAGE_TYPE:
            # A row of one element keeps a stride that `view` refuses, so the elements are copied.
            bits = obj.new_empty(obj.numel()).copy_(obj.detach().reshape(-1)).view(torch.uint8)
            return from_bits, (bits, obj.dtype, tuple(obj.shape))
        return NotImplemented


def pack(value: object) -> bytes:
    """The value as bytes. Raises TypeError that says what cannot travel."""
    buffer = io.BytesIO()
    try:
        ByValue(buffer, pickle.HIGHEST_PROTOCOL).dump(value)
    except (pickle.PicklingError, TypeError, AttributeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{_brief(value)} cannot travel between processes: {error}") from error
    return buffer.getvalue()


def unpack(data: bytes) -> Any:
    """The inverse of `pack`."""
    return pickle.loads(data)


def reference_to(function: FunctionType) -> FunctionRef:
    """How another process finds this function. Raises TypeError for a local one or a lambda."""
    module = sys.modules.get(function.__module__)
    found: object = module
    for name in function.__qualname__.split("."):
        found = getattr(found, name, None)
    if module is None or found is not function:
        raise TypeError(
            f"{function.__qualname__} of {function.__module__} cannot be found by its name: "
            "what a rank runs is defined with `def` at the top level of a module"
        )
    return FunctionRef(function.__module__, function.__qualname__, getattr(module, "__file__", ""))


def find_function(ref: FunctionRef) -> Any:
    found: Any = _module(ref)
    for name in ref.qualname.split("."):
        found = getattr(found, name)
    return found


def _module(ref: FunctionRef) -> object:
    module = sys.modules.get(ref.module)
    if module is None:
        try:
            module = importlib.import_module(ref.module)
        except ModuleNotFoundError as error:
            if error.name is None or not (ref.module + ".").startswith(error.name + "."):
                raise
    if module is not None and getattr(module, "__file__", "") == ref.path:
        return module
    # pytest may have loaded the file under a name that leads elsewhere, or nowhere, from here.
    spec = importlib.util.spec_from_file_location(ref.module, ref.path)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot load {ref.module} from {ref.path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[ref.module] = module
    spec.loader.exec_module(module)
    return module


def _brief(value: object) -> str:
    text = shown(value)
    return text if len(text) <= 80 else f"{text[:77]}..."

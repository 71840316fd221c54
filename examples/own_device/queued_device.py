"""A device of type "queued", registered with torch from Python alone.

torch keeps one type of device for others, PrivateUse1. From Python it can be given a name, a module
(`torch.queued`) and operators. Its memory here is the host's: a tensor has a storage of its own, on
the device, that keeps the bytes of the host alive which it stands for. So every operator that torch
has for the CPU does for the device, on tensors of the host that share those bytes; what makes it a
device is that the operator is put on a stream (queued_streams.py) and runs later.

It has no float64, as some devices have none, and no pinned memory. Its storages cannot be resized,
since torch 2.13 gives Python no hook for that.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from typing import Any

import queued_streams as streams
import torch
from queued_streams import NAME, Event, Stream
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._pytree import tree_map

# What this device is to lack, by names of dtypes or of the module: "float64,Stream,stream,Event".
MISSING = tuple(filter(None, os.environ.get("QUEUED_WITHOUT", "").split(",")))

_DEVICE_KEY, _AUTOCAST_KEY = "PrivateUse1", "AutocastPrivateUse1"
_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_AUTOCAST = torch._C.DispatchKeySet(torch._C._dispatch_key_parse(_AUTOCAST_KEY))
_aten = torch.ops.aten


# ---- Memory


def _new(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor of the device, on memory of its own."""
    if str(dtype).removeprefix("torch.") in MISSING:
        raise TypeError(f"a {NAME} device has no {dtype}")
    last = sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    numel = 0 if 0 in size else last + 1
    made = torch._C._acc.create_empty_tensor((0,), dtype)
    return _set(made, _storage(numel * dtype.itemsize), 0, size, stride)


def _storage(size_bytes: int) -> torch.UntypedStorage:
    host = torch.UntypedStorage(size_bytes, device="cpu")
    made: Any = torch._C._construct_storage_from_data_pointer(
        host.data_ptr(), torch.device(NAME, 0), size_bytes
    )
    made.host = host  # torch keeps this Python object as long as a tensor has the storage
    storage: torch.UntypedStorage = made
    return storage


def _bytes_of(storage: Any) -> torch.UntypedStorage:
    """The bytes of the host which a storage stands for.

    Where torch reads or writes a file, it makes a storage of a pointer, which keeps nothing alive.
    """
    host: Any = getattr(storage, "host", None)
    if host is None:
        host = torch._C._construct_storage_from_data_pointer(
            storage.data_ptr(), torch.device("cpu"), storage.nbytes()
        )
    found: torch.UntypedStorage = host
    return found


def _cloned(storage: Any) -> torch.UntypedStorage:
    """As `deepcopy` needs it; torch would ask the device for memory in C++."""
    copied: torch.UntypedStorage
    if storage.device.type != NAME:
        copied = _cloned_by_torch(storage)
        return copied
    copied = made = _storage(storage.nbytes())
    streams.current_stream().enqueue(lambda: _bytes_of(made).copy_(_bytes_of(storage)))
    return copied


def _set(tensor: Tensor, storage: Any, offset: int, size: Any, stride: Any) -> Tensor:
    """The CPU's operator does it, as it only looks at sizes."""
    set_ = _aten.set_.source_Storage_storage_offset
    made: Tensor = set_.redispatch(_CPU, tensor, storage, offset, size, stride)
    return made


def _on_host(value: Any) -> Any:
    """A tensor of the host with the same memory; what is no tensor of the device, as it is."""
    if isinstance(value, torch.device) and value.type == NAME:
        return torch.device("cpu")
    if not isinstance(value, Tensor) or value.device.type != NAME:
        return value
    host = torch.empty(0, dtype=value.dtype, device="cpu")
    host.set_(
        _bytes_of(value.untyped_storage()), value.storage_offset(), value.size(), value.stride()
    )
    host = host.conj() if value.is_conj() else host
    return torch._neg_view(host) if value.is_neg() else host


def _without_values(value: Any) -> Any:
    """A tensor of device "meta" for one of the host."""
    if isinstance(value, torch.device):
        return torch.device("meta")
    return value.to("meta") if isinstance(value, Tensor) else value


# ---- Operators


def _operator(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Any operator that has none of its own below."""
    if _is_view(op):
        return op.redispatch(_CPU, *args, **kwargs)
    host_args, host_kwargs = tree_map(_on_host, (args, kwargs))
    shapes = _shapes(op, host_args, host_kwargs)
    if shapes is None:
        streams.current_stream().synchronize()
        return tree_map(_on_device, op(*host_args, **host_kwargs))
    written = _written(op, args, kwargs)
    if written and all(r.alias_info for r in op._schema.returns):
        for tensor, shape in zip(written, shapes, strict=True):
            if tensor.shape != shape.shape:
                tensor.resize_(shape.shape)
        host_args, host_kwargs = tree_map(_on_host, (args, kwargs))
        streams.current_stream().enqueue(lambda: op(*host_args, **host_kwargs))
        return written[0] if len(written) == 1 else tuple(written)
    made = [_new(shape.shape, shape.stride(), shape.dtype) for shape in shapes]
    targets = [_on_host(tensor) for tensor in made]

    def kernel() -> None:
        for target, result in zip(targets, _listed(op(*host_args, **host_kwargs)), strict=True):
            # Of a gradient that was not asked for, or of statistics in evaluation, there is none.
            if result is not None and result.numel():
                target.copy_(result)

    streams.current_stream().enqueue(kernel)
    if len(op._schema.returns) == 1 and "List" not in str(op._schema.returns[0].type):
        return made[0]
    return tuple(made)


def _is_view(op: Any) -> bool:
    returned = op._schema.returns
    return bool(returned) and all(r.alias_info and not r.alias_info.is_write for r in returned)


def _shapes(op: Any, args: Any, kwargs: Any) -> list[Tensor] | None:
    """What the operator returns, as tensors without values; None if that takes the values.

    Raises what the operator has against its arguments.
    """
    drawn = torch.Tag.nondeterministic_seeded in op.tags
    valued = drawn or torch.Tag.data_dependent_output in op.tags
    if valued or torch.Tag.dynamic_output_shape in op.tags:
        return None
    meta_args, meta_kwargs = tree_map(_without_values, (args, kwargs))
    try:
        results = op(*meta_args, **meta_kwargs)
    except NotImplementedError:
        return None
    found = [result for result in _listed(results) if isinstance(result, Tensor)]
    return found if len(found) == len(op._schema.returns) or isinstance(results, list) else None


def _listed(results: Any) -> Sequence[Any]:
    return results if isinstance(results, list | tuple) else [results]


def _written(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """The arguments that the operator writes to."""
    arguments = zip(op._schema.arguments, args, strict=False)
    given = [*arguments, *((a, kwargs[a.name]) for a in op._schema.arguments if a.name in kwargs)]
    return [v for a, v in given if a.alias_info and a.alias_info.is_write]


def _on_device(value: Any) -> Any:
    """A tensor of the device with the values of one of the host that is not in use elsewhere."""
    if not isinstance(value, Tensor):
        return value
    made = _new(value.shape, value.stride(), value.dtype)
    _on_host(made).copy_(value)
    return made


def _empty(size: Sequence[int], dtype: torch.dtype | None = None, **options: Any) -> Tensor:
    format = options.get("memory_format")
    shape = torch.empty(
        size, dtype=dtype, device="meta", memory_format=format or torch.contiguous_format
    )
    return _new(size, shape.stride(), shape.dtype)


def _empty_strided(
    size: Sequence[int], stride: Sequence[int], dtype: torch.dtype | None = None, **_: Any
) -> Tensor:
    return _new(size, stride, dtype or torch.get_default_dtype())


def _copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """Between the host and the device, or on the device.

    As with CUDA, what is read on the host is read before the call returns unless it is
    `non_blocking`, and what is written there is there by then.
    """
    from_host, to_host = source.device.type == "cpu", target.device.type == "cpu"
    values = source.clone() if from_host and not non_blocking else _on_host(source)
    copied = _on_host(target)
    values = values.expand_as(copied)
    stream = streams.current_stream()
    stream.enqueue(lambda: copied.copy_(values))
    if (to_host or not hasattr(target.untyped_storage(), "host")) and not non_blocking:
        stream.synchronize()
    return target


def _resize(tensor: Tensor, size: Sequence[int], **_: Any) -> Tensor:
    old = _on_host(tensor)
    shape = torch.empty(size, device="meta")
    if (
        shape.numel()
        <= old.untyped_storage().nbytes() // old.element_size() - tensor.storage_offset()
    ):
        offset = int(tensor.storage_offset())
        return _set(tensor, tensor.untyped_storage(), offset, size, shape.stride())
    made = _new(size, shape.stride(), tensor.dtype)
    room, kept = _on_host(made).untyped_storage(), old.untyped_storage()
    first = tensor.storage_offset() * tensor.element_size()
    streams.current_stream().enqueue(lambda: room[: len(kept) - first].copy_(kept[first:]))
    return _set(tensor, made.untyped_storage(), 0, size, shape.stride())


def _convolution(*args: Any) -> Tensor:
    """What torch calls on the devices of others, where its own have kernels of several kinds."""
    found: Tensor = _operator(_aten.convolution.default, *args)
    return found


def _convolution_backward(
    grad: Tensor, x: Tensor, weight: Tensor, *options: Any
) -> tuple[Tensor | None, ...]:
    """As `_convolution`; torch's own devices are told the size of the bias, too."""
    sizes = [weight.shape[1] * options[-2] if options[3] else weight.shape[0]]
    op = _aten.convolution_backward.default
    found: tuple[Tensor | None, ...] = _operator(op, grad, x, weight, sizes, *options)
    return found


def _by_redispatch(name: str) -> Callable[..., Any]:
    """An operator of the CPU, which looks at no element."""
    packet, _, overload = name.partition(".")
    op = getattr(getattr(torch.ops.aten, packet), overload or "default")
    return lambda *args, **kwargs: op.redispatch(_CPU, *args, **kwargs)


def _record_stream(tensor: Tensor, stream: Any) -> None:
    """Nothing to tell: what is queued keeps the memory that it uses."""


def _in_lower_precision(op: Any) -> Callable[..., Any]:
    """The operator under `torch.autocast`: floats of 32 bits are cast first."""

    def cast(value: Any) -> Any:
        narrow = isinstance(value, Tensor) and value.dtype == torch.float32
        return value.to(torch.get_autocast_dtype(NAME)) if narrow else value

    def lowered(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
            return op(*tree_map(cast, args), **tree_map(cast, kwargs))

    return lowered


def _place_of(storage: Any) -> str | None:
    """What `torch.save` writes down as the place of a storage."""
    return NAME if storage.device.type == NAME else None


def _loaded_to(storage: Any, place: str) -> torch.UntypedStorage | None:
    """The storage that `torch.load` makes on the device of one that it has read."""
    if not place.startswith(NAME):
        return None
    made: Any = _storage(storage.nbytes())
    made.host.copy_(storage)
    loaded: torch.UntypedStorage = made
    return loaded


# ---- The module, `torch.queued`


class Module:
    """What torch and its users ask of a type of device."""

    Stream, Event = Stream, Event
    current_stream = staticmethod(streams.current_stream)
    default_stream = staticmethod(streams.default_stream)
    set_stream = staticmethod(streams.set_stream)
    stream = staticmethod(streams.stream)
    synchronize = staticmethod(streams.synchronize)

    def __init__(self) -> None:
        self._bytes = 0

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def set_device(self, device: Any) -> None:
        """There is only one."""

    def device(self, device: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def get_device_name(self, index: Any = 0) -> str:
        return "queues on the host"

    def _is_in_bad_fork(self) -> bool:
        return False

    def get_rng_state(self, device: Any = None) -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)

    def manual_seed_all(self, seed: int) -> None:
        """Random numbers are those of the host's generator."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


def _register() -> Module:
    for name in set(MISSING) & vars(Module).keys():
        delattr(Module, name)
    module = Module()
    backend_registration._setup_privateuseone_for_python_backend(NAME, module)
    return module


_module = _register()
_library = torch.library.Library("aten", "IMPL")
_everywhere = torch.library.Library("_", "IMPL")
_everywhere.fallback(_operator, _DEVICE_KEY)
_SETTING = ("set_.source_Storage", "set_.source_Storage_storage_offset", "set_.source_Tensor")
OWN: dict[str, Callable[..., Any]] = {
    "empty.memory_format": _empty,
    "empty_strided": _empty_strided,
    "copy_": _copy,
    "resize_": _resize,
    "convolution_overrideable": _convolution,
    "convolution_backward_overrideable": _convolution_backward,
    **{name: _by_redispatch(name) for name in _SETTING},
    "record_stream": _record_stream,
}
for _name, _function in OWN.items():
    _library.impl(_name, _function, _DEVICE_KEY)
_everywhere.fallback(torch.library.fallthrough_kernel, _AUTOCAST_KEY)
for _name in ("linear", "mm", "addmm", "bmm", "conv2d"):
    _lowered = _in_lower_precision(getattr(_aten, _name).default)
    _library.impl(_name, _lowered, _AUTOCAST_KEY)
_cloned_by_torch: Any = torch.UntypedStorage.clone
torch.UntypedStorage.clone = _cloned  # type: ignore[method-assign]  # as no allocator can be registered
torch.serialization.register_package(1, _place_of, _loaded_to)

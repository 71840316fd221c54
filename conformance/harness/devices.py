"""Functions for devices of any type (CPU, CUDA, XPU, ...): availability, placement, seeds, memory,
streams. No other module of the harness names one.

A type is what `torch.device` takes: "xpu", or "npu" once the package is imported that brings it.
Its module is `torch.<type>`, as `torch.get_device_module` gives it. A module need not have all that
`torch.cuda` has: what it lacks is None or False here. What `torch.accelerator` knows stands in for
it where it can.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from conformance.capabilities import DEVICE_FEATURES, DTYPES

HOST = "cpu"

# Where a case for devices runs if the target names none.
DEFAULT = "cuda"

# Threads that torch starts once and keeps for the life of a process; they belong to no case.
THREADS_FOR_LIFE = ("pt_autograd", "OMP", "libgomp", "cuda", "kineto", "python-watchdog")

# Devices that a driver opens when it first needs them, and keeps open: of NVIDIA, AMD, Intel, and
# of Huawei's Ascend, Habana and Cambricon, by the documentation of their containers.
DRIVER_FILES = (
    "/dev/nvidia",
    "/dev/kfd",
    "/dev/dri",
    "/dev/davinci",
    "/dev/devmm_svm",
    "/dev/hisi_hdc",
    "/dev/accel",
    "/dev/hl",
    "/dev/cambricon",
)


def is_known(type: str) -> bool:
    """Whether torch has devices of this type in this process, be there any or not."""
    return type == HOST or module_of(type) is not None


def module_of(type: str) -> Any:
    """The module of a device type, or None: `torch.xpu` for "xpu"."""
    try:
        return torch.get_device_module(type)
    except RuntimeError:  # no such type, or one without a module
        return None


def title(type: str) -> str:
    """The type as people write it."""
    return "CUDA" if type == "cuda" else type


def type_for(type: str, backend: str) -> str:
    """Where a case for devices runs: on the target's type if that is not the host, else on the
    first other one that its backend names ("cpu:x,npu:y"), else on the default.
    """
    named = [part.partition(":")[0] for part in backend.split(",") if ":" in part]
    return next((t for t in (type, *named) if t != HOST), DEFAULT)


def known_types() -> tuple[str, ...]:
    """The types on which tensors of this process may be: the host, the default, and torch's own
    accelerator here, if that is another one.
    """
    current = torch.accelerator.current_accelerator()
    return tuple(dict.fromkeys((HOST, DEFAULT, *([current.type] if current else []))))


def count(type: str) -> int:
    """How many devices of the type there are; 0 for the host."""
    module = None if type == HOST else module_of(type)
    if module is None or _call(module, "is_available") is False:
        return 0
    found = _call(module, "device_count")
    if found is None:
        found = torch.accelerator.device_count() if _is_accelerator(type) else 1
    return int(found)


def why_unusable(type: str) -> str:
    """Why no rank can be on such a device here, "" if one can."""
    if not is_known(type):
        return f"torch knows no device of type {type!r}, and nothing that it imports brings one"
    if type != HOST and count(type) == 0:
        return f"there is no {title(type)} device here"
    return ""


def names(type: str) -> list[str]:
    """The names of all devices of the type, as far as they have any."""
    return [_name(type, index) or f"{type}:{index}" for index in range(count(type))]


def _name(type: str, index: int) -> str | None:
    module = module_of(type)
    name = _call(module, "get_device_name", index)
    if name is None:
        name = getattr(_call(module, "get_device_properties", index), "name", None)
    return name if isinstance(name, str) else None


def place(type: str, rank: int) -> torch.device:
    """The device of a rank, made its current one: rank r uses device r modulo their number."""
    if type == HOST:
        return torch.device(HOST)
    found = count(type)
    if found == 0:
        raise RuntimeError(f"rank {rank}: {why_unusable(type)}")
    device = torch.device(type, rank % found)
    set_current(device)
    return device


def set_current(device: torch.device) -> bool:
    """Make it the process's current device; False where its type has no such thing."""
    module = module_of(device.type)
    if hasattr(module, "set_device"):
        module.set_device(device)
        return True
    if _is_accelerator(device.type):
        torch.accelerator.set_device_index(device.index)
        return True
    return False


def synchronize(type: str) -> bool:
    """Wait for all work on the current device; False where nothing can be waited for."""
    module = module_of(type)
    if type == HOST or module is None:
        return False
    if hasattr(module, "synchronize"):
        module.synchronize()
        return True
    if not _is_accelerator(type):
        return False
    try:
        torch.accelerator.synchronize()
    except RuntimeError:  # torch can, but this accelerator cannot
        return False
    return True


def seed(type: str, value: int) -> bool:
    """Seed the generators of the host and of all devices of the type; False where the type has
    none that can be seeded.
    """
    if type == HOST and torch.accelerator.current_accelerator() is None:
        # `torch.manual_seed` would keep a stack trace for each type of device that is not in use.
        torch.default_generator.manual_seed(value)
        return True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of a device that it cannot seed
        torch.manual_seed(value)
    if type == HOST:
        return True
    module = module_of(type)
    # What torch itself has seeded is seeded the same once more: it does not reach every type.
    for name in ("manual_seed_all", "manual_seed"):
        if hasattr(module, name):
            getattr(module, name)(value)
            return True
    return False


def memory_allocated(device: torch.device) -> int | None:
    """Bytes that tensors have on the device, or None where they are not counted."""
    module = module_of(device.type)
    found: int | None = _call(module, "memory_allocated", device)
    if found is None:
        found = _call(module, "current_allocated_memory")  # the name in torch.mps
    return found


def start_peak(device: torch.device) -> bool:
    """Forget the peak of `memory_allocated` so far; False where there is none."""
    module = module_of(device.type)
    if not hasattr(module, "max_memory_allocated"):
        return False
    if not hasattr(module, "reset_peak_memory_stats"):
        return False
    module.reset_peak_memory_stats(device)
    return True


def peak_memory(device: torch.device) -> int | None:
    """The most bytes that tensors had on the device at once, or None where they are not counted."""
    found: int | None = _call(module_of(device.type), "max_memory_allocated", device)
    return found


def has_streams(type: str) -> bool:
    """Whether work can be put on streams of one's own."""
    module = module_of(type)
    return type != HOST and hasattr(module, "Stream") and hasattr(module, "stream")


def has_events(type: str) -> bool:
    """Whether points in a stream can be marked."""
    return type != HOST and hasattr(module_of(type), "Event")


def has_pinned_memory(type: str) -> bool:
    """Whether the host's memory can be pinned for it."""
    if not _is_accelerator(type):
        return False
    try:
        return torch.zeros(1, pin_memory=True).is_pinned()
    except RuntimeError:
        return False


def has_resizable_storage(type: str) -> bool:
    """Whether a storage can be freed and allocated again in place."""
    try:
        torch.empty(1, device=type).untyped_storage().resize_(0)
    except RuntimeError:
        return False
    return True


def has_moved_data(type: str) -> bool:
    """Whether a tensor of the host may be given one of the device for its data, and is moved so."""
    try:
        torch.empty(1).data = torch.empty(1, device=type)
    except RuntimeError:
        return False
    return True


def has_autocast(type: str) -> bool:
    """Whether `torch.autocast` computes in bfloat16 on it."""
    try:
        torch.autocast(type, torch.bfloat16)
    except (RuntimeError, AssertionError):
        return False
    return True


def can_synchronize(type: str) -> bool:
    """Whether `torch.accelerator.synchronize` waits for it."""
    try:
        if _is_accelerator(type):
            torch.accelerator.synchronize()
    except RuntimeError:
        return False
    return True


def can_unscale(type: str) -> bool:
    """Whether gradients can be divided by a scale, and searched for infinities, in one call."""
    try:
        gradient, found, scale = (torch.ones(1, device=type) for _ in range(3))
        torch._amp_foreach_non_finite_check_and_unscale_([gradient], found, scale)
    except (RuntimeError, ValueError):
        return False
    return True


# Dtypes in which devices need not compute: they store and move them.
_STORED = frozenset({"bool", "uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2"})


def has_dtype(type: str, name: str) -> bool:
    """Whether tensors of this dtype can be copied there, computed with and copied back."""
    try:
        x = torch.zeros(2, dtype=getattr(torch, name)).to(type)
        (x if name in _STORED else x.add_(x)).cpu()
    except (RuntimeError, TypeError, ValueError):
        return False
    return True


def lacks(type: str) -> tuple[str, ...]:
    """Capabilities ("dtype:float64", "device:streams") that no target can have on such a device, as
    the device has not got them. None of the host, nor where there is no such device.

    Of a device that cannot even add float32, dtypes say nothing.
    """
    if count(type) == 0:
        return ()
    has = {
        "streams": has_streams,
        "events": has_events,
        "pinned_memory": has_pinned_memory,
        "resizable_storage": has_resizable_storage,
        "moved_data": has_moved_data,
        "autocast": has_autocast,
        "synchronize": can_synchronize,
        "unscaling": can_unscale,
    }
    dtypes = DTYPES if has_dtype(type, "float32") else ()
    return (
        *(f"device:{name}" for name in DEVICE_FEATURES if not has[name](type)),
        *(f"dtype:{name}" for name in dtypes if not has_dtype(type, name)),
    )


def compute_in_full(type: str) -> bool:
    """Have float32 computed in all its bits: convolutions in TF32 have ten, and would be judged by
    what a CPU computes. False where there is no such switch.
    """
    holders: list[Any] = [torch.backends.cudnn] if type == "cuda" else []
    holders += [getattr(torch.backends, type, None), module_of(type)]
    found = [holder for holder in holders if hasattr(holder, "allow_tf32")]
    for holder in found:
        holder.allow_tf32 = False
    return bool(found)


def warm_up(device: torch.device) -> None:
    """Have the device's libraries open and start what they keep for the life of the process."""
    with _stream_of_its_own(device), contextlib.suppress(NotImplementedError):
        matrix = torch.ones(2, 2, device=device)
        torch.mm(matrix, matrix)[0, :1].copy_(_pinned(device.type), non_blocking=True)
        if has_events(device.type):
            module_of(device.type).Event().record()
    synchronize(device.type)


@contextlib.contextmanager
def _stream_of_its_own(device: torch.device) -> Iterator[None]:
    if not has_streams(device.type):
        yield
        return
    module = module_of(device.type)
    with module.stream(module.Stream(device)):
        yield


def _pinned(type: str) -> torch.Tensor:
    """One element of host memory, pinned if that is possible."""
    return torch.zeros(1, pin_memory=has_pinned_memory(type))


def _is_accelerator(type: str) -> bool:
    """Whether `torch.accelerator` speaks of this type."""
    current = torch.accelerator.current_accelerator()
    return current is not None and current.type == type


def _call(module: Any, name: str, *args: Any) -> Any:
    """What a function of the module returns, or None where it has none."""
    function = getattr(module, name, None)
    return None if function is None else function(*args)

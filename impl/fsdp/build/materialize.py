"""Prepares a module for flattening: chooses its device, materializes meta parameters, moves it, and
broadcasts rank 0's values."""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from impl.device import DeviceHandle
from impl.fsdp.build.ignored import Ignored, managed_params
from impl.fsdp.step.state import state_of
from impl.torch_private import broadcast_coalesced_from

# As torch's FSDP does it, so that mixed jobs broadcast the same buckets.
SYNC_BUCKET_BYTES = 250 * 1024 * 1024

ParamInitFn = Callable[[nn.Module], None]


def choose_device_type(
    module: nn.Module, ignored: Ignored, device_id: int | torch.device | None
) -> torch.device:
    """The kind of device to run on: `device_id`, or where parameters are, or the accelerator.

    On a machine without accelerator that is the CPU (torch 2.13 raises there, unless `device_id`
    says so).

    Raises:
        RuntimeError: if parameters are on devices of different kinds.
    """
    if device_id is not None:
        return torch.device(device_id)
    chosen: torch.device | None = None
    for param in managed_params(module, ignored.params):
        if param.device.type in ("cpu", "meta"):
            continue
        if chosen is not None and param.device.type != chosen.type:
            raise RuntimeError(
                "FSDP does not support modules with different device types but got params on "
                f"{chosen.type} and {param.device.type}"
            )
        chosen = chosen or param.device
    # one that is there: a torch built for CUDA names it on machines without a device too
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return chosen or accelerator or torch.device("cpu")


def explicit_device(
    device_id: int | torch.device | None, rank: int, device_handle: DeviceHandle
) -> torch.device | None:
    """`device_id` with an index, None if there is none."""
    if device_id is None:
        return None
    device = torch.device(device_id)
    index: int | None = device.index
    if device.type == "cpu" or index is not None:
        return device
    current = device_handle.current_device()
    warnings.warn(
        f"FSDP got the argument `device_id` {device_id} on rank {rank}, which does not have an "
        f"explicit index. FSDP will use the current device {current}. If this is incorrect, please "
        f"explicitly call `torch.{device.type}.set_device()` before FSDP initialization or pass in "
        "the explicit device index as the `device_id` argument.",
        stacklevel=4,
    )
    return current


def check_single_device(
    module: nn.Module, ignored: Ignored, device_id: int | torch.device | None
) -> None:
    """Parameters must be on one device; or on CPU and one more if `device_id` is given."""
    devices = {param.device for param in managed_params(module, ignored.params)}
    if len(devices) == 2 and torch.device("cpu") in devices:
        if device_id is None:
            raise RuntimeError(
                "To support a module with both CPU and GPU params, please pass in device_id "
                "argument."
            )
    elif len(devices) > 1:
        raise RuntimeError(f"FSDP only supports single device modules but got params on {devices}")


def materialize(
    module: nn.Module,
    ignored: Ignored,
    param_init_fn: ParamInitFn | None,
    device: torch.device,
) -> None:
    """Give storage to parameters and buffers without one (meta device, deferred init).

    Only modules that no nested instance manages are touched.

    Raises:
        ValueError: if `param_init_fn` is needed and not callable.
    """
    params = list(managed_params(module, ignored.params))
    deferred_init = _deferred_init_of(params)
    is_meta = any(param.is_meta for param in params) or any(
        buffer.is_meta
        for submodule in module.modules()
        if submodule not in ignored.modules
        for buffer in submodule.buffers(recurse=False)
    )
    if not is_meta and deferred_init is None:
        return
    if param_init_fn is not None:
        if not callable(param_init_fn):
            raise ValueError(
                f"Expected {param_init_fn} to be callable but got {type(param_init_fn)}"
            )
        for submodule in _own_modules(module, ignored):
            param_init_fn(submodule)
    elif is_meta:
        _reset_parameters(_own_modules(module, ignored), device)
    else:
        assert deferred_init is not None
        deferred_init.materialize_module(
            module,
            check_fn=lambda sub: state_of(sub) is None and sub not in ignored.modules,
        )


def _deferred_init_of(params: Iterable[nn.Parameter]) -> Any:
    """torchdistX's module for deferred initialisation if it made one of `params`, else None."""
    if importlib.util.find_spec("torchdistx") is None:
        return None
    fake = importlib.import_module("torchdistx.fake")
    if not any(fake.is_fake(param) for param in params):
        return None
    return importlib.import_module("torchdistx.deferred_init")


def _own_modules(root: nn.Module, ignored: Ignored) -> Iterator[nn.Module]:
    """The modules under `root`, breadth first, down to nested instances and ignored modules."""
    queue, seen = deque([root]), {root}
    while queue:
        module = queue.popleft()
        yield module
        for child in module.children():
            if child not in seen and state_of(child) is None and child not in ignored.modules:
                seen.add(child)
                queue.append(child)


@torch.no_grad()
def _reset_parameters(modules: Iterable[nn.Module], device: torch.device) -> None:
    for module in modules:
        own_states = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if not own_states:
            continue
        module.to_empty(device=device, recurse=False)
        try:
            reset: Any = module.reset_parameters
            reset()
        except BaseException as error:
            warnings.warn(
                "Unable to call `reset_parameters()` for module on meta device with error "
                f"{error}. Please ensure that your module of type {type(module)} implements a "
                "`reset_parameters()` method.",
                stacklevel=5,
            )
            raise


def move_to_device(module: nn.Module, ignored: Ignored, device: torch.device) -> None:
    """Move what is on CPU and not ignored to `device`, nested instances left out."""
    cpu = torch.device("cpu")
    if device == cpu:
        return
    ignored_buffers = {b for m in ignored.modules for b in m.buffers()}
    queue = deque([module])
    with torch.no_grad():
        while queue:
            current = queue.popleft()
            for param in current.parameters(recurse=False):
                if param.device == cpu and param not in ignored.params:
                    param.data = param.to(device)
                    if param.grad is not None:
                        param.grad.data = param.grad.to(device)
            for buffer in current.buffers(recurse=False):
                if buffer.device == cpu and buffer not in ignored_buffers:
                    buffer.data = buffer.to(device)
            queue.extend(child for child in current.children() if state_of(child) is None)


def warn_if_on_cpu(module: nn.Module, ignored: Ignored, compute_device: torch.device) -> None:
    param = next(managed_params(module, ignored.params), None)
    if param is None or param.device.type != "cpu" or compute_device.type == "cpu":
        return
    warnings.warn(
        "The passed-in `module` is on CPU and will thus have FSDP's sharding initialization run on "
        "CPU, which may be slower than on GPU. We recommend passing in the `device_id` argument "
        "for FSDP to move `module` to GPU for the sharding initialization. `module` must also be "
        "on GPU device to work with the `sync_module_states=True` flag since that requires GPU "
        "communication.",
        stacklevel=4,
    )


def find_compute_device(
    module: nn.Module,
    ignored: Ignored,
    explicit: torch.device | None,
    rank: int,
    device_handle: DeviceHandle,
) -> torch.device:
    """Where the unit computes: where its parameters are, or the current device if on CPU.

    Raises:
        ValueError: if that is not the device that was asked for.
    """
    param = next(managed_params(module, ignored.params), None)
    if param is not None and param.device.type != "cpu":
        device = param.device
    else:
        device = device_handle.current_device()
    if explicit is not None and device != explicit:
        raise ValueError(
            f"Inconsistent compute device and `device_id` on rank {rank}: {device} vs {explicit}"
        )
    return device


def sync_module_states(
    module: nn.Module,
    params: Iterable[nn.Parameter],
    groups: Iterable[dist.ProcessGroup],
    compute_device: torch.device,
) -> None:
    """Broadcast `params` and buffers from rank 0 of each group, one group after the other.

    With hybrid sharding the group between nodes comes first, so that the first rank of every node
    has the right values when it broadcasts them inside its node. Buffers that a nested instance has
    synchronized are left out.

    Raises:
        ValueError: if a tensor is on CPU while the group communicates on another device.
    """
    done = {
        buffer
        for submodule in module.modules()
        if (state := state_of(submodule)) is not None and state.synced_module_states
        for buffer in submodule.buffers()
    }
    buffers = [buffer for buffer in module.buffers() if buffer not in done]
    tensors = [_local(tensor.detach()) for tensor in (*buffers, *params)]
    if compute_device.type != "cpu" and any(t.device.type == "cpu" for t in tensors):
        raise ValueError(
            "The module has CPU parameters or buffers when `sync_module_states=True`, which "
            "requires them to be on GPU. Please specify the `device_id` argument or move the "
            "module to GPU before passing it to FSDP."
        )
    if tensors:
        for group in groups:
            broadcast_coalesced_from(group, tensors, SYNC_BUCKET_BYTES, 0)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor

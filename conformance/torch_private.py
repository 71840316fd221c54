"""Private names of torch that the harness cannot do without. Checked on torch 2.13.0."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from types import WrapperDescriptorType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch.distributed import distributed_c10d
from torch.nn.modules.batchnorm import _BatchNorm
from torch.storage import TypedStorage
from torch.torch_version import TorchVersion

BackendOfAGroup = c10d.Backend
# Whether it can have subclasses in Python, which needs an __init__ of its own.
takes_python_backends = not isinstance(vars(BackendOfAGroup)["__init__"], WrapperDescriptorType)


def on_new_group(callback: Callable[[str, dist.ProcessGroup], None]) -> None:
    """Call back with name and group whenever torch makes one for this process, from now on.

    All of `init_process_group`, `new_group`, `split_group` and DeviceMesh come through one helper,
    some of them by a name that was bound before the public function could be wrapped.
    """
    make = distributed_c10d._new_process_group_helper

    def noted(*args: Any, **kwargs: Any) -> Any:
        made = make(*args, **kwargs)
        if isinstance(made[0], dist.ProcessGroup):
            callback(distributed_c10d._world.pg_names.get(made[0], "?"), made[0])
        return made

    distributed_c10d._new_process_group_helper = noted


def never_compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Keeps dynamo away from calls of a function, and from what it calls."""
    eval_frame = torch._C._dynamo.eval_frame
    skip = eval_frame._FrameAction.SKIP
    strategy = eval_frame._FrameExecStrategy(skip, skip)
    eval_frame.set_code_exec_strategy(function.__code__, strategy)
    return function


def forget_group_count() -> None:
    """Start numbering groups from 0 again, if there is no default group.

    torch does so when the default group is destroyed, but not when it could not be made: after a
    second try, its name would then differ from that on ranks whose first try succeeded.
    """
    if not dist.is_initialized():
        distributed_c10d._world.group_count = 0


def registered_name(group: Any) -> str:
    """The name under which torch knows the group, also where the group itself has none."""
    return str(distributed_c10d._world.pg_names.get(group, group))


def allocated(group: Any, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """(numel,), in memory from the group's backend. Raises what that raises if it has none."""
    tensor: Tensor = group._get_backend(device).allocate_tensor(numel, dtype=dtype, device=device)
    return tensor


def registered_works() -> int:
    """How many works torch keeps for `wait_tensor` on their outputs, in this process."""
    return int(torch._C._distributed_c10d._get_work_registry_size())


def modes_entered() -> tuple[object, ...]:
    """How many modes and hooks over whole operations this thread is in, and how it goes backward.

    The modes include that of `torch.set_default_device`.
    """
    return (
        torch._C._len_torch_function_stack(),
        torch._C._len_torch_dispatch_stack(),
        torch._C._autograd._top_saved_tensors_default_hooks(True),
        torch._C._is_multithreading_enabled(),
    )


def how_tensors_are_printed() -> str:
    """What `torch.set_printoptions` sets."""
    return repr(torch._tensor_str.PRINT_OPTS)


def tables_with_entries() -> list[str]:
    """Which of torch's tables about groups are not empty, by their names."""
    names = ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "tags_to_pg", "pg_to_tag")
    return [name for name in names if getattr(distributed_c10d._world, name)]


def forget_meshes(device: torch.device | None = None) -> None:
    """Empty the caches that hold each mesh, with its groups, on which a DTensor was computed.

    device: of which the cache of autograd's own thread is emptied, too. The host has no such one.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return
    from torch.distributed.tensor import DTensor, _collective_utils, _redistribute, debug

    _collective_utils.MeshTopoInfo.build_from_mesh.cache_clear()
    _redistribute.clear_redistribute_planner_cache()
    _redistribute._gen_transform_infos.cache_clear()
    debug._clear_sharding_prop_cache()
    if device is not None and device.type != "cpu":
        x = torch.ones((), device=device, requires_grad=True) * 1
        x.register_hook(lambda _: debug._clear_sharding_prop_cache())
        x.backward()
    DTensor._op_dispatcher.sharding_propagator._propagate_tensor_meta_cached.cache_clear()


def forget_group_of_grad_scaler() -> None:
    """The default group that exists when ShardedGradScaler is imported becomes the default of an
    argument, and lives on. Make that None, which stands for the current default group."""
    module: Any = sys.modules.get("torch.distributed.fsdp.sharded_grad_scaler")
    if module is None:
        return
    init = module.ShardedGradScaler.__init__
    init.__defaults__ = tuple(
        None if isinstance(value, dist.ProcessGroup) else value for value in init.__defaults__ or ()
    )


def empty_lost_meshes() -> None:
    """Before version 2.13, torch loses a reference to the mesh of each DTensor that is detached or
    viewed. What such meshes hold is dropped; no mesh can be used after this."""
    if (
        torch.__version__ >= TorchVersion("2.13")
        or "torch.distributed.device_mesh" not in sys.modules
    ):
        return
    from torch.distributed.device_mesh import DeviceMesh

    for found in gc.get_objects():
        if type(found) is DeviceMesh:
            vars(found).clear()


def reconfigure_handle() -> str:
    """Of the default group, since torch 2.14; torch calls it experimental."""
    newer: Any = distributed_c10d
    handle: str = newer._get_reconfigure_handle()
    return handle


def reconfigure(number: int, handles: Collection[str], **how: Any) -> Any:
    """The default group, since torch 2.14."""
    newer: Any = distributed_c10d
    return newer._reconfigure(number, handles, **how)


def sequence_number(group: dist.ProcessGroup) -> int:
    """How many operations the group has counted."""
    number: int = group._get_sequence_number_for_group()  # type: ignore[attr-defined]  # not in the stub
    return number


def bytes_of_storage(storage: TypedStorage) -> bytes | None:
    """What lies in a storage, on whatever device; None for one on the meta device."""
    untyped = storage._untyped_storage
    if untyped.device.type == "meta":
        return None
    flat = torch.empty(0, dtype=torch.uint8).set_(untyped.cpu())
    return flat.numpy().tobytes()


def is_rebuilding(function: object) -> bool:
    """Whether torch rebuilds pickled tensors or layouts with this function."""
    name = getattr(function, "__name__", "")
    of_a_tensor = name.startswith("_rebuild_") and getattr(torch._utils, name, None) is function
    return of_a_tensor or function is torch.serialization._get_layout


def check_sparse_tensors() -> None:
    """Raises RuntimeError if a sparse tensor that was rebuilt since the last call has indices
    outside of it, which a reader would follow."""
    with torch.sparse.check_sparse_tensor_invariants():
        torch._utils._validate_loaded_sparse_tensors()


def without_attributes(reduced: tuple[Any, ...]) -> tuple[Any, ...]:
    """How a plain tensor is pickled, without attributes that were set on it."""
    maker, args = reduced[:2]
    if maker is torch._tensor._rebuild_from_type_v2 and args[1] in (
        torch.Tensor,
        torch.nn.Parameter,
    ):
        return args[0], args[2]
    return reduced


def storage_of_bytes(data: bytes, dtype: torch.dtype) -> TypedStorage:
    """A storage on the CPU with a copy of the data."""
    flat = torch.empty(len(data), dtype=torch.uint8)
    if data:
        flat.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    return TypedStorage(wrap_storage=flat.untyped_storage(), dtype=dtype, _internal=True)


def default_store() -> dist.Store:
    """The store of the default group, with the group's prefix."""
    store: dist.Store = distributed_c10d._get_default_store()
    return store


def store_based_barrier(store: dist.Store, rank: int, ranks: int, timeout: timedelta) -> None:
    """The barrier with which groups begin under TORCH_DIST_INIT_BARRIER=1."""
    name: Any = "of a case"  # torch 2.13 has a type of its own for names
    distributed_c10d._store_based_barrier(rank, store, name, ranks, timeout)


# The class that all of torch's batch norm layers share; tools tell them by it.
BatchNormBase = _BatchNorm


def bucket_assignment(
    tensors: Sequence[Tensor],
    limits: Sequence[int],
    expect_sparse: Sequence[bool] = (),
    ready_order: Sequence[int] = (),
) -> list[list[int]]:
    """The buckets into which torch's DDP puts tensors.

    limits: in bytes, one after the other.
    ready_order: the index of each tensor, if they come in the order in which they became ready;
        buckets are then in the order in which they were filled.
    """
    buckets, _ = dist._compute_bucket_assignment_by_size(
        list(tensors), list(limits), list(expect_sparse), list(ready_order)
    )
    return [list(bucket) for bucket in buckets]

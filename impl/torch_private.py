"""Wrappers of torch's private names (c10d, DDP, FSDP, autograd, profiler), each with its reason.

Checked with torch 2.13.0 and 2.11.0; names that differ are looked up in a way that works with both.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import Backend as _CppBackend
from torch.autograd import Variable
from torch.distributed._shard.sharded_tensor import (
    Shard,
    ShardedTensor,
    ShardedTensorMetadata,
    TensorProperties,
    init_from_local_shards,
)
from torch.distributed._shard.sharding_spec import ShardMetadata
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    _CHECKPOINT_PREFIX,
    _CHECKPOINT_WRAPPED_MODULE,
    ActivationWrapper,
)
from torch.distributed.algorithms._comm_hooks import LOW_PRECISION_HOOKS
from torch.nn.modules.batchnorm import _BatchNorm

T = TypeVar("T")

# Activation checkpointing puts a module of its own between a parent and its child; the names that
# users see must not show it. Torch offers no public way to ask.
CHECKPOINT_PREFIX: str = _CHECKPOINT_PREFIX
CHECKPOINT_WRAPPED_MODULE: str = _CHECKPOINT_WRAPPED_MODULE

# FSDP hooks that compress and decompress by themselves: the runtime must not cast around them.
FSDP_LOW_PRECISION_HOOKS: tuple[Callable[..., Any], ...] = tuple(LOW_PRECISION_HOOKS)

# By this base class, users and torch's own tools (FSDP's mixed precision) tell batch norm layers.
BatchNormBase = _BatchNorm

__all__ = [
    "CHECKPOINT_PREFIX",
    "CHECKPOINT_WRAPPED_MODULE",
    "FSDP_LOW_PRECISION_HOOKS",
    "ActivationWrapper",
    "BatchNormBase",
    "ShardedTensor",
    "all_gather_single",
    "broadcast_coalesced_from",
    "composed_apis",
    "is_backward_running",
    "is_wrap_policy",
    "mark_for_compiler",
    "queue_backward_callback",
    "reduce_scatter_single",
    "run_wrap_policy",
    "sharded_tensor_from_flat_shard",
    "sharded_tensor_from_rows",
]


def premul_sum(factor: float) -> Any:
    """`ReduceOp.PREMUL_SUM(factor)`, which torch 2.11 and 2.12 make by a private function alone."""
    op: Any = dist.ReduceOp.PREMUL_SUM
    return op(factor) if callable(op) else dist._make_nccl_premul_sum(factor)


def all_gather_single(
    output: torch.Tensor, source: torch.Tensor, group: dist.ProcessGroup, async_op: bool
) -> dist.Work | None:
    """`dist.all_gather_single`, which torch 2.11 calls `all_gather_into_tensor`.

    2.13 deprecates the old name. The function is looked up at each call, so that tools which
    replace it in `torch.distributed` (recorders, tests) see the call.
    """
    new: Any = getattr(dist, "all_gather_single", None)
    work: dist.Work | None = (new or dist.all_gather_into_tensor)(
        output, source, group=group, async_op=async_op
    )
    return work


def reduce_scatter_single(
    output: torch.Tensor,
    source: torch.Tensor,
    group: dist.ProcessGroup,
    async_op: bool,
    op: Any = dist.ReduceOp.SUM,
) -> dist.Work | None:
    """`dist.reduce_scatter_single`, which torch 2.11 calls `reduce_scatter_tensor`."""
    new: Any = getattr(dist, "reduce_scatter_single", None)
    work: dist.Work | None = (new or dist.reduce_scatter_tensor)(
        output, source, op=op, group=group, async_op=async_op
    )
    return work


def is_wrap_policy(policy: object) -> bool:
    """Whether this is one of torch's wrap policies that are objects; others are plain functions."""
    # Imported here: it takes most of a second, which a backend without FSDP does not need.
    from torch.distributed.fsdp.wrap import _Policy

    return isinstance(policy, _Policy)


def run_wrap_policy(
    policy: Any,
    root: nn.Module,
    ignored_modules: set[nn.Module],
    root_kwargs: dict[str, Any],
) -> dict[nn.Module, dict[str, Any]]:
    """The modules under `root` that `policy` chooses, with the constructor's arguments for each."""
    chosen: dict[nn.Module, dict[str, Any]] = policy._run_policy(
        root, ignored_modules, dict(root_kwargs)
    )
    return chosen


def sharded_tensor_from_rows(
    local: torch.Tensor | None,
    full: torch.Tensor,
    row_counts: Sequence[int],
    placements: Sequence[str],
    group: dist.ProcessGroup,
) -> ShardedTensor:
    """A `ShardedTensor` of the shape of `full`, split along dimension 0. No communication.

    `row_counts` and `placements` have an entry for each rank that holds rows, in order; `local` are
    this rank's rows, contiguous, or None.
    """
    offsets = [sum(row_counts[:place]) for place in range(len(row_counts))]
    metadata = [
        ShardMetadata([offset] + [0] * (full.dim() - 1), [rows, *full.shape[1:]], placement)
        for offset, rows, placement in zip(offsets, row_counts, placements, strict=True)
    ]
    global_rank = dist.get_rank()
    shards = []
    if local is not None:
        place = dist.get_group_rank(group, global_rank)
        shards.append(
            Shard.from_tensor_and_offsets(local, metadata[place].shard_offsets, global_rank)
        )
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        shards,
        ShardedTensorMetadata(
            shards_metadata=metadata,
            size=full.shape,
            tensor_properties=TensorProperties(
                dtype=full.dtype,
                layout=full.layout,
                requires_grad=False,
                memory_format=torch.contiguous_format,
                pin_memory=local is not None and local.is_pinned(),
            ),
        ),
        process_group=group,
    )


def sharded_tensor_from_flat_shard(
    local: torch.Tensor, offset: int, full_numel: int, group: dist.ProcessGroup
) -> ShardedTensor:
    """A one-dimensional `ShardedTensor` of which `local`, maybe empty, is this rank's part.

    A collective: ranks exchange their metadata.
    """
    shards = (
        [Shard.from_tensor_and_offsets(local, [offset], dist.get_rank())] if local.numel() else []
    )
    result: ShardedTensor = init_from_local_shards(shards, full_numel, process_group=group)
    return result


@functools.cache
def _keep_compiler_out_of(package: str) -> None:
    from torch._dynamo import trace_rules

    trace_rules.add(package)


def mark_for_compiler(modules: Iterable[nn.Module], *, use_orig_params: bool, package: str) -> None:
    """Prepare `modules`, whose parameters move while they run, for `torch.compile`.

    The compiler must not trace the code of `package`, which moves them, and must take them as
    inputs of what it compiles. The attributes are those that torch's compiler looks for; without
    original parameters it refuses. Building any optimizer loads the compiler anyway.
    """
    if use_orig_params:
        _keep_compiler_out_of(package)
    for module in modules:
        module._is_fsdp_managed_module = True  # type: ignore[assignment]  # any attribute will do
        module._fsdp_use_orig_params = use_orig_params  # type: ignore[assignment]  # likewise


def queue_backward_callback(callback: Callable[[], None]) -> None:
    """Have autograd call `callback` when the backward pass that is running ends.

    Only legal while a backward pass runs. Autograd has no public equivalent.

    Raises:
        RuntimeError: it is compiled, and calls nothing when it ends.
    """
    refuse_compiled_backward()
    Variable._execution_engine.queue_callback(callback)


def in_compiled_backward() -> bool:
    """Whether this runs in a backward pass that compiled autograd compiled, or is compiled so."""
    compiled: Any = sys.modules.get("torch._dynamo.compiled_autograd")
    return compiled is not None and bool(compiled.in_compiled_autograd_region)


def refuse_compiled_backward() -> None:
    """Raises RuntimeError in a compiled backward pass."""
    if in_compiled_backward():
        raise RuntimeError(
            "Compiled autograd is not compatible with FSDP and with DDP's reducer. For DDP, please "
            'use torch._dynamo.config.optimize_ddp="python_reducer".'
        )


def is_backward_running() -> bool:
    """Whether the calling thread is inside a backward pass. Autograd has no public equivalent."""
    return bool(torch._C._current_graph_task_id() != -1)


def broadcast_coalesced_from(
    group: dist.ProcessGroup, tensors: Sequence[torch.Tensor], bucket_bytes: int, src: int
) -> None:
    """Broadcast `tensors` from group rank `src`, coalesced by dtype into buckets."""
    dist._broadcast_coalesced(group, list(tensors), bucket_bytes, src)


def composed_apis(module: nn.Module) -> frozenset[str]:
    """Names of torch's composable APIs (`replicate`, `fully_shard`) applied to `module`."""
    from torch.distributed._composable.contract import _get_registry

    registry = _get_registry(module)
    return frozenset(registry) if registry else frozenset()


# For DDP. The size of the first bucket, as torch's reducer.hpp has it.
DEFAULT_FIRST_BUCKET_BYTES: int = dist._DEFAULT_FIRST_BUCKET_BYTES


# What `Future.then` and `Work.get_future` return; `torch.futures.Future` is a subclass.
FutureBase: type[Any] = torch._C.Future


def foreach_copy_(targets: list[Any], sources: list[Any]) -> None:
    """Copy each source to its target in one call. Stable for years, but not documented."""
    torch._foreach_copy_(targets, sources)


def foreach_mul_(tensors: list[Any], factor: float) -> None:
    """Multiply each tensor by `factor` in one call."""
    torch._foreach_mul_(tensors, factor)


def foreach_div_(tensors: list[Any], divisor: float) -> None:
    """Divide each tensor by `divisor` in one call."""
    torch._foreach_div_(tensors, divisor)


def allreduce_options() -> Any:
    """Options of `ProcessGroup.allreduce`: sum. The groups' own methods take them positionally."""
    return dist.distributed_c10d.AllreduceOptions()


def broadcast_options(root: int) -> Any:
    """Options of `ProcessGroup.broadcast`; `root` is a rank in the group."""
    options = dist.distributed_c10d.BroadcastOptions()
    options.rootRank = root
    return options


def allgather_options() -> Any:
    """Options of `ProcessGroup.allgather`."""
    return dist.distributed_c10d.AllgatherOptions()


def group_store(group: dist.ProcessGroup) -> dist.Store | None:
    """The store that the ranks of `group` share; None for a group made without one."""
    try:
        store: dist.Store = group.get_group_store()
    except (AttributeError, RuntimeError):
        world = dist.distributed_c10d._world.pg_map.get(group)
        return None if world is None else world[1]
    return store


def group_sequence_number(group: dist.ProcessGroup) -> int | None:
    """How many collectives `group` has begun, the same on all its ranks; None if it cannot tell."""
    try:
        count_of: Any = group._get_sequence_number_for_group  # type: ignore[attr-defined]  # not in the stubs
        return int(count_of())
    except RuntimeError:
        return None


def gloo_thread_count(group: dist.ProcessGroup) -> int | None:
    """How many threads torch's gloo runs for `group`; None if it is another backend."""
    try:
        options: Any = group._get_backend(torch.device("cpu")).options
        return int(options._threads)
    except (AttributeError, RuntimeError):
        return None


def debug_is_on() -> bool:
    """Whether TORCH_DISTRIBUTED_DEBUG is INFO or DETAIL."""
    return bool(dist.get_debug_level() != dist.DebugLevel.OFF)


def debug_is_detail() -> bool:
    """Whether TORCH_DISTRIBUTED_DEBUG is DETAIL."""
    return bool(dist.get_debug_level() == dist.DebugLevel.DETAIL)


def profiler_is_on() -> bool:
    """Whether a profiler records. Asking costs far less than an unrecorded `record_function`."""
    return bool(torch.autograd._profiler_enabled())


def waits_by_tensor() -> bool:
    """Whether `wait_tensor` on outputs must wait for calls made now: see
    `allow_inflight_collective_as_graph_input_ctx`."""
    return bool(torch._C._distributed_c10d._allow_inflight_collective_as_graph_input())


def register_work(tensor: torch.Tensor, work: dist.Work) -> None:
    """Let `wait_tensor` on the tensor wait for this work. torch keeps both until then."""
    register: Any = torch._C._distributed_c10d._register_work
    register(tensor, work)


def wait_by_tensor(tensor: torch.Tensor) -> None:
    """Wait for all works that are registered for the tensor's storage, and forget them."""
    torch.ops._c10d_functional.wait_tensor(tensor)


class _Failure:
    """Is in a future in place of a result. A search for tensors in it raises the error."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise _copy_of(self._error)


def _copy_of(error: Exception) -> Exception:
    """Another one, without a traceback; the same one if its class asks for more than its `args`."""
    try:
        return copy.copy(error)
    except TypeError:
        return error


def fail_future(
    future: torch.futures.Future[Any], error: Exception, *, has_devices: bool = False
) -> None:
    """`future.set_exception(error)`, which C++ code notices too.

    `set_exception` makes the error the result, and leaves it to the future's Python methods to
    raise it. C++ code, such as the Reducer of torch's DDP, looks for tensors in the result, which
    means to pickle it; in an exception it finds none, and takes the first of them all the same.
    A future with devices looks for them itself when it gets its result, and must not find an error.

    What the future keeps is never raised, and so has no traceback: a wait for the future
    holds it, and a circle that goes through C++ is never freed.
    """
    kept = _copy_of(error)

    def raise_error(_: Any) -> None:
        raise _copy_of(kept)

    future._set_unwrap_func(raise_error)
    future.set_result(kept if has_devices else _Failure(kept))


def begin_profiler_range(name: str, inputs: Sequence[torch.Tensor]) -> torch.futures.Future[None]:
    """Begin a range with the inputs' shapes, which ends when some thread sets the
    result of the future."""
    over: torch.futures.Future[None] = torch.futures.Future()
    handle = torch.autograd._record_function_with_args_enter(name, *inputs)
    # torch 2.11 loses a range that is ended on another thread by the function made for that
    torch.ops.profiler._call_end_callbacks_on_jit_fut._RecordFunction(handle, over)
    return over


def backend_memory(
    group: dist.ProcessGroup, numel: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor | None:
    """Memory that the backend of `group` communicates from faster; None if it has none."""
    try:
        backend: Any = group._get_backend(device)
        if not backend.supports_tensor_alloc(device):
            return None
        tensor: torch.Tensor = backend.allocate_tensor(numel, dtype=dtype, device=device)
    except (AttributeError, RuntimeError):
        return None
    return tensor


def pytree_flatten(tree: Any) -> tuple[list[Any], Any]:
    """The leaves of nested containers, and their structure."""
    leaves, structure = torch.utils._pytree.tree_flatten(tree)
    return list(leaves), structure


def pytree_unflatten(leaves: Sequence[Any], structure: Any) -> Any:
    """The inverse of `pytree_flatten`."""
    return torch.utils._pytree.tree_unflatten(list(leaves), structure)


def local_value_of_rref(value: Any) -> tuple[bool, Any]:
    """Whether `value` is an RRef that this process owns, and what it refers to."""
    if not dist.rpc.is_available():
        return False, None
    from torch.distributed.rpc import RRef

    if not isinstance(value, RRef) or not value.is_owner():
        return False, None
    return True, value.local_value()


def allocate_storage(tensor: torch.Tensor, shape: torch.Size) -> None:
    """Give `tensor` the memory that `free_storage` took from it, uninitialised."""
    storage = tensor.untyped_storage()
    nbytes = shape.numel() * tensor.element_size()
    if storage.size() != nbytes:
        storage.resize_(nbytes)


def free_storage(tensor: torch.Tensor) -> None:
    """Free the memory of `tensor`, which must be the only one in its storage."""
    storage = tensor.untyped_storage()
    if storage.size():
        storage.resize_(0)


def optimizer_hook_handles(param: torch.Tensor) -> list[Any]:
    """The hooks by which `_apply_optimizer_in_backward` steps the optimizer of `param`."""
    from torch.distributed.optim import apply_optimizer_in_backward

    handles: Any = apply_optimizer_in_backward.param_to_optim_hook_handle_map
    return list(handles.get(param, []))


# For the process group. The base class of every backend's options, which torch exports nowhere
# else.
BackendOptions = _CppBackend.Options

# What `dist.all_reduce` hands to a group. The stubs do not know it.
AllreduceOptions: Any = dist.distributed_c10d.AllreduceOptions
OpType: Any = torch._C._distributed_c10d.OpType  # type: ignore[attr-defined]


def chunk_and_cat(tensors: Sequence[torch.Tensor], into: torch.Tensor) -> None:
    """Cut each tensor into as many parts along dimension 0 as `into` has rows; row r gets all r-th
    parts, one behind the other, each with zeros behind it up to the size of the first."""
    if tensors:
        torch._chunk_cat(list(tensors), 0, into.size(0), out=into)


def preserve_version_counters(
    tensors: Sequence[torch.Tensor],
) -> contextlib.AbstractContextManager[Any]:
    """Let in-place changes inside the context go unseen by autograd."""
    preserve: Callable[..., Any] = torch.autograd._unsafe_preserve_version_counter
    return cast(contextlib.AbstractContextManager[Any], preserve(tuple(tensors)))


# torch's own wrapper: code that asks `isinstance(model, DistributedDataParallel)`, in torch
# (checkpoints, pipelining, dynamo) and elsewhere, should see ours as one.
TorchDDP: Any = torch.nn.parallel.DistributedDataParallel


def default_group() -> dist.ProcessGroup:
    """The default process group; raises if there is none."""
    return dist.distributed_c10d._get_default_group()


def is_registered(group: dist.ProcessGroup) -> bool:
    """Whether torch knows the group: from when its maker has made it until it is destroyed."""
    return group in dist.distributed_c10d._world.pg_map


def is_in_group(group: Any) -> bool:
    """Whether this process belongs to `group`; others hold a placeholder."""
    return not dist.distributed_c10d._rank_not_in_group(group)


def device_index(device: Any) -> int:
    """The index of a GPU given as index, string or device."""
    return int(torch._utils._get_device_index(device, True))


def move_inputs(
    args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device, use_side_stream: bool
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Forward's arguments with their tensors on `device`."""
    moved_args, moved_kwargs = dist.utils._to_kwargs(args, kwargs, device, use_side_stream)
    return moved_args[0], moved_kwargs[0]


def cast_inputs(
    dtype: torch.dtype, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Forward's arguments with their floating tensors cast to `dtype`."""
    cast_args, cast_kwargs = dist.utils._cast_forward_inputs(dtype, *args, **kwargs)
    return cast_args, cast_kwargs


def overlapped_optimizer(optimizer: type, params: Any, *args: Any, **kwargs: Any) -> Any:
    """A functional form of `optimizer` that steps parameter by parameter."""
    from torch.distributed.algorithms._optimizer_overlap import _as_overlapped_optim

    return _as_overlapped_optim(optimizer, params, *args, **kwargs)


def uses_python_reducer() -> bool:
    """Whether dynamo is configured to compile DDP's reductions, rather than leave them to hooks.

    Asks only if dynamo is loaded: loading takes a second, and it cannot have been configured
    before.
    """
    dynamo = sys.modules.get("torch._dynamo")
    return dynamo is not None and bool(dynamo.config.optimize_ddp == "python_reducer")


def active_ddp() -> nn.Module | None:
    """The DDP wrapper whose forward runs."""
    module: nn.Module | None = TorchDDP._active_ddp_module
    return module


def exchange_active_ddp(module: nn.Module | None) -> nn.Module | None:
    """Tell dynamo that `module`, a DDP wrapper, runs; returns the one that ran before.

    Dynamo cuts the graphs that it compiles meanwhile where the wrapper's buckets end. It refuses
    buckets that are smaller than the default size of the first one, so it is told of no such ones.
    """
    before: nn.Module | None = TorchDDP._active_ddp_module
    bucket_bytes: Any = getattr(module, "bucket_bytes_cap", 0)
    is_cut = bucket_bytes >= dist._DEFAULT_FIRST_BUCKET_BYTES
    TorchDDP._active_ddp_module = module if is_cut else None
    return before


MixedPrecision: Any = torch.nn.parallel.distributed._MixedPrecision


def fuse_compiled_reductions(bucket_bytes: int) -> None:
    """Let inductor fuse the all_reduces of compiled autograd up to `bucket_bytes`."""
    inductor_config: Any = torch._inductor.config
    inductor_config._fuse_ddp_communication = True
    inductor_config._fuse_ddp_bucket_size = bucket_bytes // (1024 * 1024)


def traced_all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The sum of `tensor` over all ranks, in a form that compilers can trace."""
    summed: torch.Tensor = dist._functional_collectives.all_reduce(tensor, "sum", group)
    return summed


def distributed_autograd_context() -> int | None:
    """The distributed autograd context of this thread; None if there is none."""
    if not dist.rpc.is_available() or not dist.rpc.api._is_current_rpc_agent_set():
        return None
    autograd: Any = dist.autograd
    try:
        return int(autograd._current_context()._context_id())
    except RuntimeError:
        return None


def distributed_autograd_gradients(context_id: int) -> dict[torch.Tensor, torch.Tensor]:
    """The gradients in a context: its own tensors, in a mapping of their own."""
    autograd: Any = dist.autograd
    gradients: dict[torch.Tensor, torch.Tensor] = autograd.get_gradients(context_id)
    return gradients

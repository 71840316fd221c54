"""Communication hooks: default all-reduce, built-in hooks, running and checking the user's hook.

A hook receives a `GradBucket` and returns a future of the tensor that takes the bucket's place. The
reducer waits for it when the backward pass is over. Without a hook the bucket, divided beforehand,
is all-reduced by sum; with one, dividing is the hook's business.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from impl.ddp.buckets.bucket import Bucket, GradBucket
from impl.torch_private import FutureBase, allreduce_options

CommHook = Callable[[Any, Any], Any]  # (state, GradBucket) -> torch.futures.Future[Tensor]

_POWER_SGD = "torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook"
_BF16_HOOKS = ("bf16_compress_hook", "bf16_compress_wrapper_hook")


def all_reduce(group: dist.ProcessGroup, tensor: Tensor) -> dist.Work:
    """Begin to add `tensor` over all ranks, in place.

    Called on the group, as torch's reducer does: `dist.all_reduce` would view complex tensors as
    real and record the call once more.
    """
    work: dist.Work = group.allreduce([tensor], allreduce_options())
    return work


def sum_hook(group: dist.ProcessGroup, bucket: GradBucket) -> Any:
    """Add the bucket over all ranks. What the reducer does without a hook.

    If all ranks know the rows that a sparse gradient may have, only these rows are added, densely;
    the result is then their values, (rows, ...).
    """
    rows = bucket.sparse_rows()
    buffer = bucket.buffer()
    if rows is not None:
        buffer = values_of_rows(buffer, rows)
    return all_reduce(group, buffer).get_future()


def values_of_rows(gradient: Tensor, rows: Tensor) -> Tensor:
    """The values of a coalesced sparse `gradient` at `rows`, zeros where it has none.

    Args:
        gradient: (all_rows, ...) sparse along its first dimension.
        rows: (rows,) sorted.

    Returns:
        (rows, ...) dense.

    Raises:
        RuntimeError: the gradient has a row that is not in `rows`.
    """
    own_rows = gradient.indices()[0]
    place = torch.searchsorted(rows, own_rows)
    known = place < rows.numel()
    known &= rows[place.clamp(max=max(rows.numel() - 1, 0))] == own_rows if rows.numel() else known
    if not bool(known.all()):
        raise RuntimeError(
            f"Sparse metadata and gradient size mismatch: the gradient has values for rows "
            f"{own_rows[~known].tolist()}, which the metadata does not list."
        )
    values = gradient.values()
    return values.new_zeros((rows.numel(), *values.shape[1:])).index_copy_(0, place, values)


def _average_hook(group: dist.ProcessGroup, bucket: GradBucket) -> Any:
    """`BuiltinCommHookType.ALLREDUCE`: divide, then add."""
    bucket.buffer().div_(group.size())
    return all_reduce(group, bucket.buffer()).get_future()


def _fp16_compress_hook(group: dist.ProcessGroup, bucket: GradBucket) -> Any:
    """`BuiltinCommHookType.FP16_COMPRESS`: as the average, with half precision on the wire.

    Divides first: a sum in half precision overflows beyond 65504.
    """
    buffer = bucket.buffer()
    compressed = buffer.to(torch.float16).div_(group.size())

    def decompress(future: Any) -> Tensor:
        return buffer.copy_(future.value()[0])

    return all_reduce(group, compressed).get_future().then(decompress)


BUILTIN_HOOKS: dict[dist.BuiltinCommHookType, CommHook] = {
    dist.BuiltinCommHookType.ALLREDUCE: _average_hook,
    dist.BuiltinCommHookType.FP16_COMPRESS: _fp16_compress_hook,
}


def run_hook(hook: CommHook, state: Any, bucket: GradBucket) -> Any:
    """Call a user's hook.

    Raises:
        RuntimeError: it did not return a future. (torch 2.13 crashes if it returned None.)
    """
    future = hook(state, bucket)
    if not isinstance(future, FutureBase):
        kind = type(future)
        raise RuntimeError(
            "DDP communication hook's callback must return a torch.futures.Future object, but got "
            f"{kind.__module__}.{kind.__qualname__}"
        )
    return future


def result_of(bucket: Bucket, *, takes_lists: bool) -> Tensor:
    """Wait for the bucket's reduction and take its result.

    Args:
        bucket: has a future.
        takes_lists: whether the future may hold a list of one tensor.

    Raises:
        RuntimeError: the reduction failed, or the future holds something else than a tensor.
    """
    result = bucket.future.wait()
    if takes_lists and isinstance(result, (list, tuple)):
        result = result[0]
    if not isinstance(result, Tensor):
        if isinstance(result, BaseException):
            raise RuntimeError(f"DDP communication hook failed: {result!r}") from result
        raise RuntimeError(
            f"Unable to cast {result!r} to Tensor: the future of a DDP communication hook must "
            "hold a single tensor."
        )
    return result


def is_power_sgd(state: Any) -> bool:
    """Whether the hook behind `state` is PowerSGD's, alone or in a wrapper.

    It views gradients as matrices of their memory, and it issues collectives from callbacks.
    """
    power_sgd = sys.modules.get(_POWER_SGD)
    return power_sgd is not None and isinstance(state, power_sgd.PowerSGDState)


def why_unusable(hook: Any, device_type: str) -> tuple[type[Exception], str] | None:
    """What speaks against registering `hook`: the exception to raise and its text.

    torch refuses its bfloat16 hooks without a recent NCCL even if the backend is another; here that
    is asked of accelerators only.
    """
    if not callable(hook):
        return TypeError, "Communication hook must be callable."
    signature = _signature(hook)
    bucket_type = signature.parameters["bucket"].annotation
    if bucket_type not in (inspect.Parameter.empty, dist.GradBucket, GradBucket):
        return ValueError, "Communication hook: bucket annotation should be dist.GradBucket."
    if signature.return_annotation not in (inspect.Signature.empty, torch.futures.Future[Tensor]):
        return (
            ValueError,
            "Communication hook: return annotation should be torch.futures.Future[torch.Tensor].",
        )
    bf16 = getattr(hook, "__name__", "") in _BF16_HOOKS
    if bf16 and device_type != "cpu" and not _bf16_on_the_wire():
        return (
            TypeError,
            "BF16 all reduce communication hook required CUDA 11+ and NCCL 2.10+ or XPU and XCCL",
        )
    return None


def _signature(hook: Any) -> inspect.Signature:
    """The signature of `hook`, with annotations that are strings evaluated if that is possible."""
    try:
        return inspect.signature(hook, eval_str=True)
    except NameError:
        return inspect.signature(hook).replace(return_annotation=inspect.Signature.empty)


def _bf16_on_the_wire() -> bool:
    built_for_gpu = torch.version.cuda is not None or torch.version.hip is not None
    if built_for_gpu and dist.is_nccl_available():
        return bool(torch.cuda.nccl.version() >= (2, 10))
    xccl_available = getattr(dist, "is_xccl_available", None)
    return xccl_available is not None and bool(xccl_available()) and torch.xpu.is_available()

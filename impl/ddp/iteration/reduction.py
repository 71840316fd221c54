"""Reduction of one bucket: fill it, start its hook or all-reduce, wait, write the gradients.

When to do what is the reducer's decision. A bucket passes through here in one direction:

    fill / take_sparse     gradients -> bucket, divided by the world size if there is no hook
    start                  the hook, or an all_reduce; leaves a future
    deliver                waits for the future; its tensor -> gradients
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from impl.ddp import messages
from impl.ddp.buckets.bucket import Bucket, GradBucket, GradientSlots
from impl.ddp.buckets.factory import empty_sparse_gradient
from impl.ddp.buckets.layout import view_gradients
from impl.ddp.iteration.comm_hooks import CommHook, is_power_sgd, result_of, run_hook, sum_hook
from impl.ddp.iteration.grad_copy import GradientCopier
from impl.ddp.iteration.used_map import UsedMap
from impl.torch_private import profiler_is_on


class BucketReduction:
    """The state that is needed to reduce buckets, and to hand the results back to the gradients."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        copier: GradientCopier,
        names: Mapping[int, str],
    ) -> None:
        """
        Args:
            group: over which to reduce.
            copier: moves dense gradients.
            names: parameter names by index, to look up sparse metadata.
        """
        self.group = group
        self.copier = copier
        self.used: UsedMap | None = None  # if parameters may go unused
        self.stepped: frozenset[int] = frozenset()  # parameters that the hook steps in backward
        self.sparse_metadata: Mapping[str, Tensor] | None = None  # of this iteration
        self.hook: CommHook | None = None
        self._hook_state: Any = None
        self._takes_lists = True  # as futures of the group's own operations hold them
        self._for_power_sgd = False
        self._names = names
        self._world_size: int | None = None  # of this iteration
        self._forward_work: tuple[Any, bool] | None = None

    def set_hook(self, state: Any, hook: CommHook, *, is_builtin: bool = False) -> None:
        """Reduce by `hook(state, bucket)` from now on. A built-in one may return a list.

        Raises:
            RuntimeError: there is one already.
        """
        if self.hook is not None:
            raise RuntimeError(
                messages.BUILTIN_HOOK_REGISTERED_TWICE
                if is_builtin
                else messages.HOOK_REGISTERED_TWICE
            )
        self.hook = hook
        self._hook_state = state
        self._takes_lists = is_builtin
        self._for_power_sgd = is_power_sgd(state)

    def set_forward_work(self, work: Any, use_static_world_size: bool) -> None:
        """`work` counts the ranks that still have input, unless all ranks are to be counted."""
        self._forward_work = (work, use_static_world_size)

    def _divisor(self) -> int | None:
        """What gradients are divided by before they are added; None if they are not.

        With a communication hook, that is the hook's business.
        """
        if self._world_size is None:
            self._world_size = self.group.size()
            if self._forward_work is not None and not self._forward_work[1]:
                work, _ = self._forward_work
                work.wait()
                self._world_size = int(work.get_future().wait()[0].item())
        if self.hook is not None or self._world_size == 1:
            return None
        return self._world_size

    # ---- gradients into buckets

    def fill(self, bucket: Bucket, slots: GradientSlots) -> None:
        """Copy gradients of a dense bucket into it: all of them, or those not yet copied."""
        if self.used is not None:
            for index, param in zip(bucket.param_indices, bucket.params, strict=True):
                self._check_undefined(index, param)
        have_history = torch.is_grad_enabled()  # while backward runs: create_graph=True
        with torch.no_grad(), profiler_range("torch::distributed::reducer::copy_"):
            self.copier.copy_in(slots, self._divisor(), have_history=have_history)

    def fill_one(self, param: Tensor, view: Tensor) -> None:
        """Copy one gradient into its slot. Short, as its code is cold whenever it runs."""
        if torch.is_grad_enabled() or profiler_is_on():
            with torch.no_grad(), profiler_range("torch::distributed::reducer::mul_out"):
                self.copier.copy_one_in(param, view, self._divisor())
        else:
            self.copier.copy_one_in(param, view, self._divisor())

    def follow_streams(self, bucket: Bucket) -> None:
        """Order the current stream after those that have written to the bucket or its gradients."""
        for stream in bucket.streams:
            bucket.device.current_stream().wait_stream(stream)
        bucket.streams.clear()

    def take_sparse(self, bucket: Bucket) -> None:
        """A sparse gradient is reduced as a copy, divided.

        Not where it is: its values may be the memory of the gradient of a layer's output, which
        other layers, or other sparse gradients, have yet to use.

        Raises:
            RuntimeError: there is no gradient, it is dense, or the metadata do not name it.
        """
        (param,) = bucket.params
        grad = param.grad
        if grad is None:
            if self.used is None:
                raise RuntimeError("Expected sparse gradient to be defined.")
            # Unused here; but another rank may have used it, and waits for our contribution.
            grad = empty_sparse_gradient(param)
        if grad.layout is not torch.sparse_coo:
            raise RuntimeError("Expected variable to have sparse gradient.")
        if self.sparse_metadata is not None:
            grad = grad.coalesce()
            bucket.sparse_rows = self._known_rows(bucket.param_indices[0]).to(grad.device)
            if param.grad is not None:
                param.grad = grad
        divisor = self._divisor()
        bucket.buffer = grad.clone() if divisor is None else grad.div(divisor)

    def _known_rows(self, index: int) -> Tensor:
        assert self.sparse_metadata is not None
        if not self._names:
            raise RuntimeError("No parameter names were found")
        name = self._names[index]
        for spelling in (name, name.removeprefix(".")):
            if spelling in self.sparse_metadata:
                return self.sparse_metadata[spelling].to(torch.int64)
        raise RuntimeError(f"param: {name} not found in sparse metadata")

    def _check_undefined(self, index: int, param: Tensor) -> None:
        assert self.used is not None
        if param.grad is None and self.used.is_marked_here(index):
            raise RuntimeError(messages.UNDEFINED_BUT_USED)

    # ---- buckets over the ranks

    def start(self, bucket: Bucket, bucket_count: int) -> None:
        """Begin to reduce a filled bucket."""
        self.follow_streams(bucket)
        bucket.future = self.run_hook(self._grad_bucket(bucket, bucket_count, bucket.buffer))

    def run_hook(self, bucket: GradBucket) -> Any:
        """Reduce `bucket`; returns the future of the result.

        Collectives that PowerSGD issues from callbacks must come in the same order on all ranks,
        before those of the next bucket and the used map. (torch 2.13 does not wait. On Gloo, where
        other threads run the callbacks, ranks then mix them up.)
        """
        if self.hook is None:
            return sum_hook(self.group, bucket)
        future = run_hook(self.hook, self._hook_state, bucket)
        if self._for_power_sgd:
            future.wait()
        return future

    def zero_bucket(self, bucket: Bucket, bucket_count: int) -> GradBucket:
        """What a rank without gradients contributes in place of `bucket`."""
        if bucket.sparse:
            zeros = empty_sparse_gradient(bucket.params[0])
        else:
            assert bucket.buffer is not None
            zeros = torch.zeros_like(bucket.buffer)
        return self._grad_bucket(bucket, bucket_count, zeros)

    def _grad_bucket(self, bucket: Bucket, bucket_count: int, buffer: Tensor | None) -> GradBucket:
        assert buffer is not None, "a bucket is reduced after it was filled"
        return GradBucket(
            bucket.index,
            bucket_count,
            buffer,
            bucket.params,
            bucket.layout,
            sparse_rows=bucket.sparse_rows,
            gradients_in_memory_order=self._for_power_sgd,
        )

    # ---- buckets into gradients

    def deliver(self, bucket: Bucket) -> None:
        """Wait for a bucket's reduction and hand its result to the gradients.

        Raises:
            RuntimeError: the reduction failed, or its result does not fit the bucket.
        """
        result = result_of(bucket, takes_lists=self._takes_lists)
        bucket.future = None
        if bucket.sparse:
            self._deliver_sparse(bucket, result)
            return
        assert bucket.buffer is not None
        assert bucket.layout is not None
        reduced = bucket.views
        if not _same_memory(result, bucket.buffer):
            reduced = view_gradients(result, bucket.layout)
        gets_none = None if self.used is None and not self.stepped else self._gets_no_gradient
        with profiler_range("torch.distributed.ddp.reducer::copy_bucket_to_grad"):
            if self.copier.gradient_as_bucket_view:
                self.copier.leave_in_bucket(bucket, reduced, gets_none)
            else:
                self.copier.copy_out(bucket, reduced, gets_none)

    def _gets_no_gradient(self, index: int) -> bool:
        """Whether an optimizer has used the gradient already, or no rank used the parameter."""
        if index in self.stepped:
            return True
        return self.used is not None and self.used.unused_everywhere(index)

    def _deliver_sparse(self, bucket: Bucket, result: Tensor) -> None:
        (param,) = bucket.params
        if bucket.sparse_rows is not None:
            rows = bucket.sparse_rows.unsqueeze(0)
            result = torch.sparse_coo_tensor(
                rows,
                result,
                param.shape,
                device=result.device,
                is_coalesced=True,
                check_invariants=False,
            )
        bucket.sparse_rows = None
        bucket.buffer = None
        if bucket.param_indices[0] in self.stepped:
            return
        if param.grad is not None:
            param.grad.copy_(result)
        elif not self._gets_no_gradient(bucket.param_indices[0]):
            param.grad = result.clone()

    def forget_iteration(self) -> None:
        """The next iteration may have another world size (join) and other sparse metadata."""
        self._world_size = None
        self._forward_work = None
        self.sparse_metadata = None


def _same_memory(result: Tensor, buffer: Tensor) -> bool:
    return result is buffer or (
        result.data_ptr() == buffer.data_ptr()
        and result.numel() == buffer.numel()
        and result.dtype == buffer.dtype
        and result.is_contiguous()
    )


def profiler_range(name: str) -> AbstractContextManager[Any]:
    """A range in the profile, if one is being recorded."""
    if not profiler_is_on():
        return contextlib.nullcontext()
    return torch.profiler.record_function(name)

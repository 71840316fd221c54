"""`Reducer`: torch's Reducer API (hooks, rebuild, statistics) on top of `BackwardPass`.

The iteration itself is in its base class, in `backward_pass`.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from impl.ddp import messages
from impl.ddp.buckets.agreement import agree_on_buckets
from impl.ddp.buckets.assignment import ErrorLog, assign_in_ready_order
from impl.ddp.buckets.bucket import GradBucket
from impl.ddp.iteration.backward_pass import BackwardPass
from impl.ddp.iteration.comm_hooks import BUILTIN_HOOKS, CommHook, sum_hook
from impl.ddp.iteration.progress import ReducerEvent
from impl.ddp.iteration.static_graph import StaticGraph
from impl.ddp.iteration.used_map import UsedMap
from impl.ddp.parameters import has_optimizer
from impl.ddp.timing import SampledTimes
from impl.torch_private import debug_is_on

logger = logging.getLogger(__name__)


class Reducer(BackwardPass):
    """Averages the gradients of `params` over a process group, bucket by bucket.

    The constructor's arguments and the methods' names are those of `torch.distributed.Reducer`.
    """

    # ---- hooks

    def register_comm_hook(self, state: Any, hook: CommHook) -> None:
        """Reduce buckets by `hook(state, bucket)`; see `torch.distributed`'s communication hooks.

        Raises:
            RuntimeError: there is a hook already.
        """
        with self._errors_noted():
            self._reduction.set_hook(state, hook)

    def register_builtin_comm_hook(self, comm_hook_type: dist.BuiltinCommHookType) -> None:
        """Reduce buckets by one of the hooks that come with DDP.

        Raises:
            RuntimeError: there is a hook already.
            TypeError: not a `BuiltinCommHookType`.
        """
        if comm_hook_type not in BUILTIN_HOOKS:
            raise TypeError(
                "register_builtin_comm_hook expects a BuiltinCommHookType, but got "
                f"{comm_hook_type!r}."
            )
        hook = BUILTIN_HOOKS[comm_hook_type]
        with self._errors_noted():
            self._reduction.set_hook(
                None, lambda _, bucket: hook(self.process_group, bucket), is_builtin=True
            )
        logger.info("Built-in communication hook %s is registered.", comm_hook_type.name)

    def _run_comm_hook(self, bucket: GradBucket) -> Any:
        """Reduce `bucket` the way this reducer does. Returns a future of the result."""
        return self._reduction.run_hook(bucket)

    def _run_allreduce_hook(self, bucket: GradBucket) -> Any:
        """Add `bucket` over all ranks, undivided. Returns a future of a list of one tensor."""
        return sum_hook(self.process_group, bucket)

    def _install_post_backward_futures(self, futures: Sequence[Any]) -> None:
        """Also wait for `futures` when the backward pass ends."""
        with self._lock:
            self._post_backward_futures += futures

    def _remove_autograd_hooks(self) -> None:
        """Stop listening to autograd. A reducer that is dropped does so by itself."""
        self._hooks.remove()

    # ---- buckets

    def _should_rebuild(self) -> bool:
        """Whether to: once, after the first backward; not where each may have another graph."""
        return not self._searches and not self.has_rebuilt_buckets

    def _rebuild_buckets(self) -> bool:
        """Rebuild the buckets in the order in which gradients became ready. Collective, once.

        Returns:
            Whether it did.

        Raises:
            RuntimeError: the previous backward pass did not reduce all buckets.
        """
        with self._lock, self._errors_noted():
            self._check_reducer_finalized()
            if not self._should_rebuild() or not self._final_order:
                return False
            assert len(self._final_order) == len(self.params), (
                "rebuilt parameter indices size is not same as original model parameters size: "
                f"{len(self._final_order)} of {len(self.params)}"
            )
            assignment = assign_in_ready_order(
                self.params, self._final_order, self._limits, self._expect_sparse
            )
            if debug_is_on():
                limits = ", ".join(str(limit) for limit in assignment.limits)
                logger.info(
                    "%d buckets rebuilt with size limits: %s bytes.",
                    len(assignment.buckets),
                    limits,
                )
            device = self.params[0].device
            agreed = agree_on_buckets(self.process_group, assignment.buckets, device)
            self.has_rebuilt_buckets = True
            self._final_order = []
            # An earlier forward pass may wait for its backward pass. If that comes, its outputs say
            # so: see `backward_begins`.
            self._progress.on(ReducerEvent.DROPPED)
            self._initialize_buckets(agreed)
            return True

    def _push_all_rebuilt_params(self) -> None:
        """A rank without input takes part in the rebuild; its order does not count."""
        with self._lock:
            if self._should_rebuild() and not self._final_order:
                self._final_order = list(range(len(self.params)))

    # ---- join(): ranks without input go on taking part

    def _set_forward_pass_work_handle(self, work: Any, use_static_world_size: bool) -> None:
        """`work` counts the ranks that have input; divide by that, or by the size of the group."""
        with self._lock:
            self._reduction.set_forward_work(work, use_static_world_size)

    def _get_zeros_like_grad_buckets(self) -> list[GradBucket]:
        """Zero gradients, bucket by bucket, in the order of reduction."""
        with self._lock:
            count = len(self.buckets)
            return [self._reduction.zero_bucket(bucket, count) for bucket in self.buckets]

    def _get_local_used_map(self) -> Tensor:
        """After backward, how many ranks used each parameter: (params,) int32, on their device."""
        return self._used_map().on_device

    def _get_empty_used_map(self) -> Tensor:
        """A used map without marks, (params,) int32 on the parameters' device.

        (torch 2.13's joined ranks contribute the sum of the previous iteration instead, so that a
        parameter that was used once counts as used as long as some rank is joined.)
        """
        with self._lock:
            return self._used_map().contribute_nothing()

    def _used_map(self) -> UsedMap:
        if self._reduction.used is None:
            raise RuntimeError("This reducer does not track which parameters are used.")
        return self._reduction.used

    # ---- settings

    def _update_process_group(self, new_process_group: dist.ProcessGroup) -> None:
        with self._lock:
            self._reduction.group = new_process_group

    def _reset_state(self) -> None:
        """Forget a backward pass that failed; buckets and a static graph are found out anew.

        What it has launched may still be under way, or wait for ranks that are gone, and keeps the
        memory that it was given.
        """
        with self._lock:
            self.has_rebuilt_buckets = False
            self._final_order = []
            self._progress.on(ReducerEvent.DROPPED)
            self._arrivals.indices.clear()
            self._reduction.forget_iteration()
            if self._reduction.used is not None:
                self._reduction.used = UsedMap(
                    len(self.params), self.params[0].device, self._device
                )
            if self._static is not None:
                # Ranks may have got to different points of the first pass, and others take part.
                self._static = StaticGraph(len(self.params))
            self._initialize_buckets([bucket.param_indices for bucket in self.buckets])

    def _set_static_graph(self) -> None:
        """Every iteration has the graph of the first one.

        Raises:
            RuntimeError: training has begun.
        """
        with self._lock, self._errors_noted():
            if self._statistics.iteration > 0:
                raise RuntimeError(messages.STATIC_GRAPH_TOO_LATE)
            self._static = StaticGraph(len(self.params))
            self._reduction.used = UsedMap(len(self.params), self.params[0].device, self._device)
            self._hooks.remove()
            self._install_hooks()

    def _set_optimizer_in_backward(self) -> None:
        """The communication hook steps the parameters that have an optimizer of their own."""
        self._reduction.stepped = frozenset(
            index for index, param in enumerate(self.params) if has_optimizer(param)
        )

    def _set_mixed_precision_param_dtype(self, dtype: torch.dtype) -> None:
        """Gradients have `dtype` while backward runs, and buckets too; afterwards they do not.

        So gradients cannot be views of buckets, and most parameters get new accumulators with each
        forward pass. The hooks of all of them are the caller's business (`_autograd_hook`).
        """
        with self._lock:
            self._mixed_precision_dtype = dtype
            self._copier.gradient_as_bucket_view = False
            self._hooks.remove()
            self._initialize_buckets([bucket.param_indices for bucket in self.buckets])

    def _set_sparse_metadata(self, metadata: Mapping[str, Tensor]) -> None:
        """The rows of each sparse gradient, by parameter name, for the next backward pass."""
        with self._lock:
            self._reduction.sparse_metadata = dict(metadata)

    # ---- what is going on

    @property
    def iteration(self) -> int:
        """Synchronised forward passes so far."""
        return self._statistics.iteration

    @property
    def timer(self) -> SampledTimes | None:
        """None on a module that spans several GPUs."""
        return self._statistics.timer

    @property
    def static_graph(self) -> bool:
        return self._static is not None

    def samples_this_iteration(self) -> bool:
        return self._statistics.sampled()

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        """After ten iterations, take statistics once in `sample_rate`."""
        self._statistics.sample_rate = sample_rate

    def get_backward_stats(self) -> list[int]:
        """When each gradient was ready, in nanoseconds since `prepare_for_backward`."""
        start_ns = self._statistics.backward_start_ns
        return [max(0, at_ns - start_ns) for at_ns in self._statistics.ready_at_ns]

    def _ddp_graph_static(self) -> bool:
        """Whether the set of unused parameters has been the same in all iterations."""
        return self._search.graph_stayed_static

    def _check_reducer_finalized(self) -> None:
        """
        Raises:
            RuntimeError: the last backward pass did not reduce all buckets.
        """
        with self._lock, self._errors_noted():
            pending = self._arrivals.take()
            if self._progress.is_expecting and pending:
                self._progress.on(ReducerEvent.FOUND_INCOMPLETE)
                self._mark(pending)
            if self._progress.is_unfinished:
                raise RuntimeError(
                    messages.unfinished_reduction(
                        rank=self.process_group.rank(),
                        missing=self._readiness.missing(),
                        names=self._names,
                        debug=debug_is_on(),
                        static_graph=self._static is not None,
                        find_unused_parameters=self.find_unused_parameters,
                    )
                )

    # ---- errors

    def set_logger(self, ddp_logger: ErrorLog) -> None:
        """Note errors there before they are raised. The reference is weak."""
        self._logger_ref = weakref.ref(ddp_logger)

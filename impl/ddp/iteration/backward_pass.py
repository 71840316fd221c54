"""Core of the reducer: hooks mark gradients ready, complete buckets are reduced during backward.

It puts four questions together, each answered elsewhere:

    which bucket does a gradient belong to?     buckets: assignment, layout, agreement
    what is still missing?                      readiness, static_graph
    what may be launched now?                   readiness.LaunchOrder
    then do it                                  reduction, grad_copy, comm_hooks

One synchronised iteration:

    prepare_for_backward        after forward: expect hooks, find unused parameters
    large_gradient_accumulated  from autograd, per large parameter: copy its gradient at once
    gradients_arrived           from autograd, when so many hooks have fired that a bucket may be
                                complete: mark their gradients; fill complete buckets, and launch
                                those whose turn it is
    gradient_accumulated        in place of both, for each hook as it fires, where its stream or
                                what it was given matters
    _finish_backward            end of the backward pass: wait, hand results to `param.grad`
    _rebuild_buckets            before the second forward: buckets in the order of readiness

`progress` says where it is, and what may come next.

Backward passes without a synchronising forward (`no_sync`) run through the hooks without effect,
other than to note which parameters they used.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import time_ns
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from impl.ddp import messages
from impl.ddp.buckets.assignment import BYTES_PER_MB, DEFAULT_BUCKET_CAP_MB, ErrorLog
from impl.ddp.buckets.bucket import Bucket, is_large
from impl.ddp.buckets.factory import build_buckets
from impl.ddp.iteration.autograd_hooks import AccumulatorHooks, Arrivals, accumulators_of
from impl.ddp.iteration.comm_hooks import all_reduce
from impl.ddp.iteration.distributed_autograd import LentGradients
from impl.ddp.iteration.grad_copy import GradientCopier
from impl.ddp.iteration.graph_search import UnusedParameterSearch, unreachable_params
from impl.ddp.iteration.progress import ReducerEvent, ReducerProgress
from impl.ddp.iteration.readiness import LaunchOrder, Readiness, ReadyTwiceError
from impl.ddp.iteration.reduction import BucketReduction, profiler_range
from impl.ddp.iteration.static_graph import StaticGraph
from impl.ddp.iteration.used_map import UsedMap
from impl.ddp.timing import Moment, SampledTimes, Statistics
from impl.device import handle_of
from impl.torch_private import (
    DEFAULT_FIRST_BUCKET_BYTES,
    debug_is_on,
    queue_backward_callback,
    refuse_compiled_backward,
)

logger = logging.getLogger(__name__)


class BackwardPass:
    """One iteration; `Reducer` adds the methods that are called between iterations."""

    def __init__(
        self,
        params: Sequence[Tensor],
        bucket_indices: Sequence[Sequence[int]],
        per_bucket_size_limits: Sequence[int],
        process_group: dist.ProcessGroup,
        expect_sparse_gradients: Sequence[bool] = (),
        bucket_bytes_cap: int = DEFAULT_BUCKET_CAP_MB * BYTES_PER_MB,
        find_unused_parameters: bool = False,
        gradient_as_bucket_view: bool = False,
        param_to_name_mapping: Mapping[int, str] | None = None,
        first_bucket_bytes_cap: int = DEFAULT_FIRST_BUCKET_BYTES,
        skip_all_reduce_unused_params: bool = False,
        use_python_reducer: bool = False,
        bucket_bytes_cap_list: Sequence[int] = (),
        batched_grad_copy: bool = False,
    ) -> None:
        """
        Args:
            params: leaves that require gradients, each once.
            bucket_indices: indices into `params`, bucket by bucket, in the order of reduction.
            per_bucket_size_limits: not used; kept for torch's signature.
            process_group: over which to average.
            expect_sparse_gradients: by parameter; none by default.
            bucket_bytes_cap: size limit when buckets are rebuilt, after the first bucket.
            find_unused_parameters: search each graph for parameters that it leaves out.
            gradient_as_bucket_view: let `param.grad` be a view of the bucket.
            param_to_name_mapping: parameter names by index, for messages.
            first_bucket_bytes_cap: size limit of the first rebuilt bucket.
            skip_all_reduce_unused_params: do not reduce buckets without any used parameter. They
                must be the same on all ranks.
            use_python_reducer: compiled code reduces the gradients; this reducer only stands by.
            bucket_bytes_cap_list: size limits bucket by bucket, instead of the two above.
            batched_grad_copy: copy and divide once a bucket, not once a parameter.

        Raises:
            RuntimeError: no parameters, or an impossible bucket.
        """
        if not params:
            raise RuntimeError("Expected at least one parameter.")
        self.params = list(params)
        self.bucket_bytes_cap = bucket_bytes_cap
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.has_rebuilt_buckets = False
        self.reduced_bucket_count = 0  # in the last backward pass
        self.unused_params: list[int] = []  # of the last backward pass; for good if it is static
        self.ready_order: list[int] = []  # hooks of the last backward pass, as they fired
        self.before_delivery: Callable[[], None] | None = None  # when autograd is done
        self.is_multi_device_module = len({param.device for param in self.params}) > 1
        self._expect_sparse = list(expect_sparse_gradients) or [False] * len(self.params)
        self._names = dict(param_to_name_mapping or {})
        self._limits = list(bucket_bytes_cap_list) or [first_bucket_bytes_cap, bucket_bytes_cap]
        self._skip_unused = skip_all_reduce_unused_params
        self._stands_by = use_python_reducer
        self._lock = threading.RLock()  # backward passes may run on several threads
        self._logger_ref: weakref.ref[ErrorLog] | None = None
        self._mixed_precision_dtype: torch.dtype | None = None
        self._post_backward_futures: list[Any] = []

        self._progress = ReducerProgress()
        self._has_begun = False  # whether the backward pass that is expected has come
        self._final_order: list[int] = []  # gradients of the last pass, as they became ready
        self._static: StaticGraph | None = None
        self._search = UnusedParameterSearch(process_group.rank(), self._names)

        self._device = handle_of(self.params[0])
        on_several_gpus = self._device.has_streams and self.is_multi_device_module
        self._statistics = Statistics(
            len(self.params), None if on_several_gpus else SampledTimes(self._device)
        )
        self._is_large = [
            not batched_grad_copy and not sparse and is_large(param)
            for param, sparse in zip(self.params, self._expect_sparse, strict=True)
        ]
        self._copier = GradientCopier(
            gradient_as_bucket_view=gradient_as_bucket_view,
            divide_once_per_bucket=batched_grad_copy,
        )
        self._lent = LentGradients(self._copier)
        self._reduction = BucketReduction(process_group, self._copier, self._names)
        if find_unused_parameters:
            self._reduction.used = UsedMap(len(self.params), self.params[0].device, self._device)
        self._arrivals = Arrivals()
        self._initialize_buckets(bucket_indices)
        self._install_hooks()
        if debug_is_on():
            logger.info(
                "Reducer initialized with bucket_bytes_cap: %d first_bucket_bytes_cap: %d",
                bucket_bytes_cap,
                first_bucket_bytes_cap,
            )

    @property
    def process_group(self) -> dist.ProcessGroup:
        return self._reduction.group

    def _initialize_buckets(self, assignment: Sequence[Sequence[int]]) -> None:
        if self._progress.is_expecting:
            raise RuntimeError("`initialize_buckets` must NOT be called during autograd execution.")
        # First, so that the memory of buckets that are rebuilt is free for the new ones.
        self.buckets: list[Bucket] = []
        self._slots: dict[int, tuple[Tensor, Tensor]] = {}  # parameter and view, by index
        self.buckets = build_buckets(
            self.params,
            assignment,
            expect_sparse=self._expect_sparse,
            group=self.process_group,
            dtype=self._mixed_precision_dtype,
            large_at_once=not self._copier.divide_once_per_bucket,
        )
        self._readiness = Readiness([bucket.param_indices for bucket in self.buckets])
        self._launch_order = LaunchOrder(len(self.buckets))
        for bucket in self.buckets:
            if bucket.all_slots is None:
                continue
            pairs = zip(bucket.params, bucket.views, strict=True)
            self._slots.update(zip(bucket.param_indices, pairs, strict=True))
            if self._copier.gradient_as_bucket_view:
                self._copier.adopt(bucket)

    # ---- before and after forward

    def prepare_for_forward(self) -> None:
        """A synchronised forward pass begins."""
        with self._lock:
            self._statistics.begin_forward()

    def prepare_for_backward(self, outputs: Sequence[Tensor] | Tensor | None) -> None:
        """Forward is over, and its backward pass is to average gradients.

        Args:
            outputs: the tensors that forward returned. They count if `wants_outputs`. None if they
                do not tell the graph: then every parameter is taken to be used.
        """
        with self._lock, self._errors_noted():
            self._statistics.begin_backward()
            self._lent.note_context()
            if self._mixed_precision_dtype is None and self._hooks.are_stale():
                self._renew_hooks()
            if outputs is None:
                self._take_all_as_used()
            elif self.wants_outputs:
                self._search_graph([outputs] if isinstance(outputs, Tensor) else outputs)
            self._expect_backward()
            self._has_begun = outputs is None  # no output will tell when it begins

    def _take_all_as_used(self) -> None:
        if self._static is not None:
            self._static.reaches_params = True
        elif self.find_unused_parameters:
            self.unused_params = []

    def _search_graph(self, outputs: Sequence[Tensor]) -> None:
        with profiler_range("torch.distributed.ddp.reducer::search_unused_parameters"):
            accumulators = self._hooks.accumulators
            if self._mixed_precision_dtype is not None:
                accumulators = accumulators_of(self.params)
            if self._static is None:
                self.unused_params = self._search.search(outputs, accumulators)
            else:
                unused = unreachable_params(outputs, accumulators)
                self._static.reaches_params = len(unused) < len(self.params)

    def backward_begins(self, unused: Sequence[int] | None = None) -> None:
        """A backward pass has reached the outputs of a synchronised forward pass.

        Usually that is expected: `prepare_for_backward` was called after that forward pass. But if
        the graph is walked a second time, or if several forward passes came first, the reducer is
        done with an earlier backward pass since. This one must be averaged too.

        Args:
            unused: the parameters that this forward pass left out, if they were searched for.
        """
        with self._lock, self._errors_noted():
            if not self._progress.is_expecting:
                if unused is not None:
                    self.unused_params = list(unused)
                self._expect_backward()
            self._has_begun = True
            if len(self.unused_params if unused is None else unused) == len(self.params):
                # No hook will ever fire on this rank, while other ranks wait for it.
                self._mark_unused_once()
            self._queue_first_static_end()

    def backward_of_no_sync_begins(self) -> None:
        """A backward pass has reached the outputs of a forward pass inside `no_sync`.

        It is not the one that an earlier forward pass, outside, may have made the reducer expect.
        If that one comes after all, `backward_begins` is called.
        """
        with self._lock:
            if self._progress.is_expecting and not self._has_begun:
                self._progress.on(ReducerEvent.DROPPED)

    @property
    def is_expecting(self) -> bool:
        """Whether a synchronised backward pass is expected, or under way."""
        return self._progress.is_expecting

    def _expect_backward(self) -> None:
        self._progress.on(ReducerEvent.FORWARD_ENDED)
        self.ready_order = []
        self.reduced_bucket_count = 0
        self._readiness.begin()
        self._launch_order.begin()
        for bucket in self.buckets:
            bucket.future = None
            if self._device.has_streams:
                # which hooks on another device's thread would know nothing of
                bucket.streams.add(bucket.device.current_stream())
        self._arrivals.indices.clear()
        self._set_alarm()
        if self._static is not None:
            self._static.begin_backward()

    @property
    def wants_outputs(self) -> bool:
        """Whether `prepare_for_backward` has to search the graph behind forward's outputs."""
        return self._searches or (self._static is not None and self._static.recording)

    @property
    def _searches(self) -> bool:
        return self.find_unused_parameters and self._static is None

    def _renew_hooks(self) -> None:
        """Hook the parameters again: a conversion (`.double()`, `.cuda()`) dropped the hooks."""
        logger.warning("Parameters were converted after DDP was constructed; hooking them anew.")
        self._hooks.remove()
        self._progress.on(ReducerEvent.DROPPED)
        self._initialize_buckets([bucket.param_indices for bucket in self.buckets])
        self._install_hooks()

    def _install_hooks(self) -> None:
        """Hook each parameter; hear of each hook at once if some may go unused or have streams."""
        is_simple = self._reduction.used is None and not self._device.has_streams
        self._hooks = AccumulatorHooks(
            self.params, self._is_large, self, self._arrivals if is_simple else None
        )
        if self._mixed_precision_dtype is not None or self._stands_by:
            self._hooks.remove()  # others hear of the gradients

    # ---- while backward runs

    def gradient_accumulated(self, index: int, delivered: bool) -> None:
        """Autograd is done with the gradient of parameter `index`, for this graph.

        Args:
            index: of the parameter.
            delivered: whether there was a gradient; False if the loss left its output out.

        Raises:
            RuntimeError: it was done with it before, a static graph has changed, or the backward
                pass is compiled.
        """
        with self._lock:
            static = self._static
            used = self._reduction.used
            if used is not None and delivered and (static is None or static.recording):
                used.mark(index)
            if not self._progress.is_expecting or self._stands_by:
                return
            if static is not None and not delivered:
                return  # not part of the loss, hence not of the static graph
            refuse_compiled_backward()
            if static is not None and static.recording:
                static.record(index)
                self._queue_first_static_end()
                return
            if self._is_large[index] and (static is None or static.comes_once_more(index)):
                self.large_gradient_accumulated(index)
            with self._errors_noted():
                self._accept([index])

    def large_gradient_accumulated(self, index: int) -> None:
        """Copy a large gradient into its bucket while it is in the cache.

        Comes before the hook counts.
        """
        if self._progress.is_expecting:
            self._lent.lend([self.params[index]])
            try:
                self._reduction.fill_one(*self._slots[index])
            except Exception as error:
                self._note(error)
                raise

    def gradients_arrived(self) -> None:
        """Enough hooks have fired that a bucket may have become complete.

        Raises:
            RuntimeError: a parameter's hook fired twice, or the backward pass is compiled.
        """
        with self._lock, self._errors_noted():
            indices = self._arrivals.take()
            if self._progress.is_expecting:
                refuse_compiled_backward()
                self._accept(indices)
            self._set_alarm()

    def _set_alarm(self) -> None:
        """Say how many hooks must fire before something can have become complete."""
        alarm = len(self.params)  # if nothing is expected, just keep the list from growing
        if self._progress.is_expecting:
            bucket = self._launch_order.next_bucket
            alarm = 1
            # Statistics tell the time of each hook. And so the first iterations, which are always
            # sampled, notice a gradient that is ready twice when it is.
            if bucket < len(self.buckets) and not self._statistics.sampled():
                alarm = self._readiness.missing_count[bucket]
        self._arrivals.wake_at = alarm

    def _accept(self, indices: list[int]) -> None:
        """Hooks of a synchronised backward pass have fired."""
        self._lent.lend([self.params[index] for index in indices])
        self.ready_order += indices
        self._mark_unused_once()
        if self._static is not None:
            indices = [index for index in indices if self._static.is_final(index)]
        self._final_order += indices
        self._mark_ready(indices)

    def _autograd_hook(self, index: int) -> None:
        """As `gradient_accumulated`, for callers that hook the parameters themselves."""
        self.gradient_accumulated(index, self.params[index].grad is not None)

    def _mark_unused_once(self) -> None:
        """In the first hook of a backward pass, also mark the parameters that are unused.

        Not earlier: forward's output may be dropped, and then nothing must be reduced.
        """
        if self._progress.has_marked:
            return
        self._progress.on(ReducerEvent.FIRST_MARKED)
        self._final_order = []
        self._choose_skipped()
        for index in self.unused_params:
            bucket = self._bucket_of(index)
            if self._is_large[index] and not bucket.skipped:
                self._reduction.follow_streams(bucket)
                self._reduction.fill_one(*self._slots[index])
        self._mark_ready(self.unused_params)

    def _mark(self, indices: list[int]) -> list[int]:
        """Gradients are ready. The buckets that this completes.

        Raises:
            RuntimeError: one of them was ready before.
        """
        try:
            return self._readiness.mark(indices)
        except ReadyTwiceError as error:
            (index,) = error.args
            raise RuntimeError(messages.ready_twice(index, self._names.get(index))) from None

    def _choose_skipped(self) -> None:
        """Before anything is filled: filling divides gradients that were left in their bucket."""
        if self._skip_unused:
            unused = set(self.unused_params)
            for bucket in self.buckets:
                bucket.skipped = unused.issuperset(bucket.param_indices)

    def _bucket_of(self, index: int) -> Bucket:
        return self.buckets[self._readiness.bucket_of[index]]

    def _mark_ready(self, indices: list[int]) -> None:
        now_ns = time_ns()
        for index in indices:
            self._statistics.ready_at_ns[index] = now_ns
        completed = self._mark(indices)
        if self._device.has_streams:
            for index in indices:
                bucket = self._bucket_of(index)
                bucket.streams.add(bucket.device.current_stream())
        for bucket_index in completed:
            bucket = self.buckets[bucket_index]
            if self._device.has_streams:
                self._reduction.follow_streams(bucket)
                # the bucket may be launched from another hook, on another stream
                bucket.streams.add(bucket.device.current_stream())
            if bucket.skipped:
                continue
            if bucket.small_slots is None:
                self._reduction.take_sparse(bucket)
            elif bucket.small_slots.params:
                self._reduction.fill(bucket, bucket.small_slots)
        if completed:
            self._launch_ready_buckets()

    def _launch_ready_buckets(self) -> None:
        for index in self._launch_order.take_ready(self._readiness):
            self._start_reduction(self.buckets[index])
        if self._launch_order.all_launched:
            if self._searches:
                self._start_used_map()
            queue_backward_callback(self._finish_backward)

    def _start_reduction(self, bucket: Bucket) -> None:
        if bucket.index == 0:
            self._statistics.record(Moment.BACKWARD_COMM_START)
        if bucket.skipped:
            return
        self._reduction.start(bucket, len(self.buckets))
        self.reduced_bucket_count += 1

    def _start_used_map(self) -> None:
        assert self._reduction.used is not None
        self._reduction.used.start_reduction(lambda used: all_reduce(self.process_group, used))

    # ---- at the end of backward

    def _queue_first_static_end(self) -> None:
        """Once in the first backward pass of a static graph.

        Best from forward's outputs: the callback belongs to the innermost backward pass, and a
        parameter's hook may run inside a checkpoint's.
        """
        if self._static is not None and self._static.wants_callback():
            queue_backward_callback(self._finish_first_static_backward)

    def _finish_backward(self) -> None:
        """Autograd is done, and all buckets are launched."""
        with self._lock, self._errors_noted():
            if not self._progress.is_expecting:
                return
            self._statistics.record(Moment.BACKWARD_COMPUTE_END)
            if self._static is not None:
                self._final_order += self.unused_params
            self._deliver()

    def _finish_first_static_backward(self) -> None:
        """End of the first backward pass of a static graph: only now is it known what is unused."""
        with self._lock, self._errors_noted():
            static = self._static
            if static is None or not static.recording or not self._progress.is_expecting:
                return
            if static.must_wait():
                return
            self._statistics.record(Moment.BACKWARD_COMPUTE_END)
            self._start_used_map()
            self.unused_params = static.end_recording()
            self._log_static_unused()
            self._progress.on(ReducerEvent.FIRST_MARKED)
            self._choose_skipped()
            for bucket in self.buckets:
                if bucket.skipped:
                    continue
                if bucket.all_slots is None:
                    self._reduction.take_sparse(bucket)
                else:
                    self._reduction.fill(bucket, bucket.all_slots)
            for bucket in self.buckets:
                self._start_reduction(bucket)
            self._deliver()

    def _log_static_unused(self) -> None:
        if debug_is_on() and self.unused_params:
            named = "".join(f"{{{self._names.get(i)},{i}}}" for i in self.unused_params)
            logger.info(
                "[Rank %d]: Parameter(s) (in the format of {param_name, index}): %s is(are) unused "
                "during first iteration. Since static_graph=True is enabled for DDP, we expect "
                "this set of unused parameters to remain consistent on this rank throughout the "
                "training.",
                self.process_group.rank(),
                named,
            )

    def _deliver(self) -> None:
        """Wait for all reductions and hand out the results."""
        self._progress.on(ReducerEvent.DELIVERED)
        self._set_alarm()
        if self.before_delivery is not None:
            self.before_delivery()
        with torch.no_grad():
            for bucket in self.buckets:
                if bucket.future is not None:
                    self._reduction.deliver(bucket)
        self._lent.take_back()
        self._reduction.forget_iteration()
        futures, self._post_backward_futures = self._post_backward_futures, []
        for future in futures:
            future.wait()
        used = self._reduction.used
        if used is not None:
            used.wait()
            if self._static is None:
                used.clear()
        self._statistics.record(Moment.BACKWARD_COMM_END)

    # ---- errors

    def _note(self, error: Exception) -> None:
        ddp_logger = None if self._logger_ref is None else self._logger_ref()
        if ddp_logger is not None:
            ddp_logger.set_error_and_log(str(error))

    @contextmanager
    def _errors_noted(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._note(error)
            raise

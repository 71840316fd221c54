"""`DistributedDataParallel`: construction, forward, `no_sync` and `join`; its bases have the rest.

This module puts the pieces together. Forward runs the user's module between two steps:

    _pre_forward    statistics; rebuild buckets; synchronise buffers; move and cast inputs
    _post_forward   arm the reducer, and have it notice when backward comes

Backward is the reducer's, by its hooks. Signature, defaults, attributes, exceptions and their words
are those of torch 2.13's `torch.nn.parallel.DistributedDataParallel`.
"""

from __future__ import annotations

import logging
import os
import warnings
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import SyncBatchNorm as TorchSyncBatchNorm

from impl.ddp.buckets.assignment import BYTES_PER_MB, BucketCaps, compute_bucket_assignment_by_size
from impl.ddp.iteration.reducer import Reducer
from impl.ddp.iteration.reduction import profiler_range
from impl.ddp.parameters import ManagedParameters, ParameterWatch, managed_parameters
from impl.ddp.wrapper.buffer_sync import BufferSync
from impl.ddp.wrapper.compiled_reduction import average_in_compiled_backward
from impl.ddp.wrapper.hook_registration import HookRegistration
from impl.ddp.wrapper.join import DDPJoinHook, JoinParticipant
from impl.ddp.wrapper.logging_data import Logger
from impl.ddp.wrapper.mixed_precision import (
    MixedPrecision,
    MixedPrecisionConfig,
    reduce_in_low_precision,
)
from impl.ddp.wrapper.module_sync import sync_module_states
from impl.ddp.wrapper.options import buffer_policy, choose_devices, choose_group
from impl.ddp.wrapper.outputs import find_tensors, notify_at, pass_through
from impl.ddp.wrapper.verification import verify_params_across_processes
from impl.torch_dispatch import outside_transforms, skipped_by_dynamo, transforms_are_active
from impl.torch_private import (
    TorchDDP,
    cast_inputs,
    exchange_active_ddp,
    move_inputs,
    uses_python_reducer,
)

_log = logging.getLogger(__name__)


class DistributedDataParallel(HookRegistration, BufferSync, JoinParticipant, Joinable):
    """Data parallelism: each rank runs the module on its own input, gradients are averaged."""

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Iterable[tuple[str, Tensor]] | None = None,
        param_to_hook_all_reduce: Tensor | None = None,
        mixed_precision: MixedPrecisionConfig | None = None,
        device_mesh: DeviceMesh | None = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Sequence[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
    ) -> None:
        """Wrap `module`. Collective, unless `init_sync` is False.

        Args:
            module: the same on all ranks; its parameters must not change afterwards.
            device_ids: for a module on one GPU, that GPU: inputs are moved there.
            output_device: where its outputs are; kept for reference.
            dim: kept for reference.
            broadcast_buffers: deprecated, see `forward_sync_buffers`; if False, buffers are not
                synchronised at construction either.
            init_sync: check that all ranks have the same parameters, and give them rank 0's values.
            process_group: over which to average; the default group by default.
            bucket_cap_mb: size of a bucket, 25 by default.
            find_unused_parameters: let parameters take no part in an iteration's graph.
            check_reduction: deprecated, ignored.
            gradient_as_bucket_view: let gradients be views of buckets, which saves their memory.
            static_graph: promise that every iteration has the first one's graph.
            delay_all_reduce_named_params: parameters to reduce together, at the end.
            param_to_hook_all_reduce: whose gradient means that theirs are complete.
            mixed_precision: dtypes for computation, reduction and buffers.
            device_mesh: a one-dimensional mesh, instead of `process_group`.
            skip_all_reduce_unused_params: do not reduce buckets that are wholly unused. They must
                be the same on all ranks.
            bucket_cap_mb_list: sizes bucket by bucket.
            batched_grad_copy: copy and divide gradients once a bucket, not once a parameter.
            forward_sync_buffers: give buffers rank 0's values before each forward pass; the
                default.

        Raises:
            RuntimeError: nothing requires a gradient, a parameter is uninitialised, ranks differ.
            ValueError: contradictory arguments, parameters on several types of devices.
        """
        nn.Module.__init__(self)
        Joinable.__init__(self)
        self._use_python_reducer = uses_python_reducer()
        self.logger: Logger | None = None
        if (delay_all_reduce_named_params is None) != (param_to_hook_all_reduce is None):
            raise ValueError(
                "delay_all_reduce_named_params and param_to_hook_all_reduce need to be set at the "
                "same time."
            )
        self.process_group = choose_group(module, process_group, device_mesh)
        if device_mesh is not None:
            self.device_mesh = device_mesh

        delayed = list(delay_all_reduce_named_params or ())
        self._delay_all_reduce_params: list[Tensor] = [param for _, param in delayed]
        self.parameters_to_ignore = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        self.parameters_to_ignore |= {name for name, _ in delayed}
        self._module_parameters = _parameters_to_manage(
            module, self.parameters_to_ignore, all_are_delayed=bool(delayed)
        )
        choice = choose_devices(
            self._module_parameters or self._delay_all_reduce_params, device_ids, output_device
        )
        self.device = choice.device
        self.device_type = choice.device.type
        self.device_ids = choice.device_ids
        self.output_device = choice.output_device
        self.is_multi_device_module = choice.is_multi_device_module
        self.dim = dim
        self.module = module
        buffers = buffer_policy(broadcast_buffers, forward_sync_buffers, stacklevel=3)
        self.forward_sync_buffers = buffers.before_forward
        self.find_unused_parameters = find_unused_parameters
        self.skip_all_reduce_unused_params = skip_all_reduce_unused_params
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.batched_grad_copy = batched_grad_copy
        self.mixed_precision = mixed_precision
        self.static_graph = False
        self.require_backward_grad_sync = True
        self.require_forward_param_sync = True
        self.broadcast_bucket_size = 250 * BYTES_PER_MB
        self.use_side_stream_for_tensor_copies = (
            os.environ.get("PYTORCH_DDP_USE_SIDE_STREAM", "1") == "1"
        )
        if mixed_precision is not None:
            _log.warning("Received mixed precision config %s", mixed_precision)
        if check_reduction:
            warnings.warn(
                "The `check_reduction` argument in `DistributedDataParallel` module is deprecated. "
                "Please avoid using it.",
                FutureWarning,
                stacklevel=2,
            )
        if bucket_cap_mb_list and self._use_python_reducer:
            raise AssertionError("when using bucket_cap_mb_list, python reducer is not supported")
        self._bucket_caps = BucketCaps.from_megabytes(bucket_cap_mb, bucket_cap_mb_list)
        self.bucket_bytes_cap = self._bucket_caps.bucket_bytes_cap
        self.bucket_bytes_cap_list = list(self._bucket_caps.per_bucket_bytes_caps)
        self.bucket_bytes_cap_default = (
            self._bucket_caps.first_bucket_bytes_cap < self.bucket_bytes_cap
        )
        self._comm_hooks = []
        self._has_rebuilt_buckets = False
        self._lazy_init_ran = False
        self._ddp_sink_clone = True
        self._precision = None
        self._assign_modules_buffers()

        self._delayed = None
        if param_to_hook_all_reduce is not None:
            # In a list, as a module registers a parameter that it is given as an attribute.
            self._delay_all_reduce_trigger = [param_to_hook_all_reduce]
            self._delayed = self._delayed_all_reduce()
            # Megabytes where bytes are meant, as in torch 2.13: ranks that run torch's DDP expect
            # the same messages.
            self._delayed.broadcast(message_bytes=self.bucket_bytes_cap // BYTES_PER_MB)
        managed = managed_parameters(module, self.parameters_to_ignore)
        self._delay_all_reduce_all_params = bool(delayed) and not managed.params
        if self._delay_all_reduce_all_params:
            return
        if init_sync:
            self._sync_at_init(managed, include_buffers=buffers.at_init)
        self._build_reducer(managed, static_graph)
        if static_graph:
            self._set_static_graph()
        if self._use_python_reducer:
            average_in_compiled_backward(self)
            self.__dict__["forward"] = self._forward_to_compile

    def _sync_at_init(self, managed: ManagedParameters, *, include_buffers: bool) -> None:
        verify_params_across_processes(
            self.process_group,
            managed.params,
            buffers=self.modules_buffers if include_buffers else (),
        )
        sync_module_states(
            self.module,
            self.process_group,
            message_bytes=self.broadcast_bucket_size,
            src=0,
            ignored=self.parameters_to_ignore,
            include_buffers=include_buffers,
        )

    def _build_reducer(self, managed: ManagedParameters, static_graph: bool) -> None:
        """The reducer, its logger and what hangs on them. Also after unpickling."""
        # Gradients become ready roughly in the reverse order of registration. The first iteration
        # tells the real order; until then see `initial_limits`.
        buckets, limits = compute_bucket_assignment_by_size(
            managed.params,
            self._bucket_caps.initial_limits(
                registration_order_is_final=self.find_unused_parameters and not static_graph
            ),
            managed.expect_sparse,
        )
        self.reducer = Reducer(
            managed.params,
            buckets[::-1],
            limits[::-1],
            self.process_group,
            managed.expect_sparse,
            self.bucket_bytes_cap,
            self.find_unused_parameters,
            self.gradient_as_bucket_view,
            managed.names,
            self._bucket_caps.first_bucket_bytes_cap,
            self.skip_all_reduce_unused_params,
            self._use_python_reducer,
            self.bucket_bytes_cap_list,
            self.batched_grad_copy,
        )
        self._watch = ParameterWatch(self.module, managed, self.parameters_to_ignore)
        self.logger = Logger(self.reducer)
        self.reducer.set_logger(self.logger)
        # A mark, as layers of other classes synchronise too, such as those of impl.sync_batchnorm.
        sync_batch_norms = [
            m
            for m in self.module.modules()
            if isinstance(m, TorchSyncBatchNorm) or getattr(m, "synchronises_batches", False)
        ]
        self.logger.set_construction_data_and_log(
            type(self.module).__name__,
            self.device_ids or [],
            -1 if self.output_device is None else self.output_device,
            self.forward_sync_buffers,
            bool(sync_batch_norms),
            static_graph,
        )
        # A subclass may work where torch's own SyncBatchNorm does not.
        if self.device_type == "cpu" and any(
            type(m) is TorchSyncBatchNorm for m in sync_batch_norms
        ):
            self._log_and_throw(ValueError, "SyncBatchNorm layers only work with GPU modules")
        if self.mixed_precision is not None:
            precision = MixedPrecision(
                self.mixed_precision, self.module, self.reducer, self.parameters_to_ignore
            )
            self._set_comm_hook(None, reduce_in_low_precision(precision))
            self._precision = precision

    def _build_params_for_reducer(self) -> tuple[list[Tensor], list[bool]]:
        """The parameters whose gradients are averaged, and which of these gradients are sparse."""
        managed = managed_parameters(self.module, self.parameters_to_ignore)
        self._assign_modules_buffers()
        return managed.params, managed.expect_sparse

    # ---- forward

    @skipped_by_dynamo(with_callees=False)
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module. Gradients of what it returns will be averaged."""
        outer = self._begin_forward()
        try:
            inputs, kwargs = self._pre_forward(*inputs, **kwargs)
            return self._post_forward(self.module(*inputs, **kwargs))
        except BaseException:
            self._no_backward_follows()
            raise
        finally:
            self._end_forward(outer)

    def _forward_to_compile(self, *inputs: Any, **kwargs: Any) -> Any:
        """The forward that compilers may look into: all else happens in the backward pass."""
        return self.module(*inputs, **kwargs)

    @skipped_by_dynamo(with_callees=True)
    def _begin_forward(self) -> tuple[AbstractContextManager[Any], nn.Module | None]:
        range_in_profile = profiler_range("DistributedDataParallel.forward")
        range_in_profile.__enter__()
        return range_in_profile, exchange_active_ddp(self)

    @skipped_by_dynamo(with_callees=True)
    def _end_forward(self, outer: tuple[AbstractContextManager[Any], nn.Module | None]) -> None:
        range_in_profile, outer_ddp = outer
        exchange_active_ddp(outer_ddp)
        range_in_profile.__exit__(None, None, None)

    @skipped_by_dynamo(with_callees=True)
    def _no_backward_follows(self) -> None:
        if self._precision is not None:
            self._precision.no_backward_follows()

    @skipped_by_dynamo(with_callees=True)
    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self._delay_all_reduce_all_params:
            return inputs, kwargs
        if not self._lazy_init_ran:
            self._setup_in_backward_optimizers()
            self._lazy_init_ran = True
        if torch.is_grad_enabled() and self.require_backward_grad_sync:
            self._require_logger().set_runtime_stats_and_log()
            self.reducer.prepare_for_forward()
        work = Join.notify_join_context(self)
        if work:
            self.reducer._set_forward_pass_work_handle(work, self._divide_by_initial_world_size)
        # Before the module runs, and not after: peak memory comes in the middle of forward and
        # backward, and for a moment old and new buckets exist side by side.
        with outside_transforms():
            if torch.is_grad_enabled() and self.reducer._rebuild_buckets():
                _log.info("Reducer buckets have been rebuilt in this iteration.")
                self._has_rebuilt_buckets = True
            if self._check_sync_bufs_pre_fwd():
                self._sync_buffers()
        if self._join_config.enable:
            self._check_global_requires_backward_grad_sync(is_joined_rank=False)
        if self.device_ids:
            device = torch.device(self.device_type, self.device_ids[0])
            inputs, kwargs = move_inputs(
                inputs, kwargs, device, self.use_side_stream_for_tensor_copies
            )
        if self._precision is not None:
            self._precision.lower()
            assert self.mixed_precision is not None
            if self.mixed_precision.param_dtype is not None:
                inputs, kwargs = cast_inputs(self.mixed_precision.param_dtype, inputs, kwargs)
        return inputs, kwargs

    @skipped_by_dynamo(with_callees=True)
    def _post_forward(self, output: Any) -> Any:
        if self._delayed is not None:
            self._delayed.attach()
        if self._delay_all_reduce_all_params:
            return output
        if self._check_sync_bufs_post_fwd():
            self._sync_buffers()
        if not torch.is_grad_enabled():
            self.require_forward_param_sync = False
            self._no_backward_follows()
            return output
        self.require_forward_param_sync = self.require_backward_grad_sync
        if not self.require_backward_grad_sync:
            self._expect_backward_of_no_sync(output)
            return self._pass_through(output)
        return self._expect_backward(output)

    def _expect_backward(self, output: Any) -> Any:
        if transforms_are_active():
            # They differentiate a graph of their own, which hides the one behind it. Gradients of
            # the wrapped parameters come from a backward pass outside, if they come.
            with outside_transforms():
                self.reducer.prepare_for_backward(None)
            return output
        outputs = list(find_tensors(output))
        self.reducer.prepare_for_backward(outputs)
        unused = self.reducer.unused_params if self._searches else None
        self_ref = weakref.ref(self)

        def backward_begins() -> None:
            ddp = self_ref()
            if ddp is not None:
                ddp._watch.look(ddp.module)
                ddp.reducer.backward_begins(unused)

        notify_at(outputs, backward_begins)
        return self._pass_through(output)

    def _expect_backward_of_no_sync(self, output: Any) -> None:
        """An earlier forward outside no_sync may expect its backward still: this is another."""
        if self.reducer.is_expecting and not transforms_are_active():
            reducer_ref = weakref.ref(self.reducer)

            def backward_begins() -> None:
                reducer = reducer_ref()
                if reducer is not None:
                    reducer.backward_of_no_sync_begins()

            notify_at(list(find_tensors(output)), backward_begins)

    @property
    def _searches(self) -> bool:
        """Whether each forward searches for parameters that its outputs do not use."""
        return self.find_unused_parameters and not self.static_graph

    def _pass_through(self, output: Any) -> Any:
        """An output that the loss leaves out does not keep the reducer waiting."""
        if not self._searches or transforms_are_active():
            return output
        return pass_through(output, clone=self._ddp_sink_clone)

    def _authoritative_buffer_rank(self, *, has_input: bool) -> int:
        """Whose buffers count: rank 0's; under join() that rank may have no input any more."""
        if self._join_config.enable or not has_input:
            return self._find_common_rank(self._distributed_rank, has_input)
        return 0

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backward accumulate gradients without averaging them.

        Forward must run inside the context too. The first synchronised backward pass afterwards
        averages what was accumulated.
        """
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    # ---- join

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """A context in which ranks may run out of input at different times.

        Args:
            divide_by_initial_world_size: divide gradients by the size of the group; if False, by
                the number of ranks that still have input.
            enable: False does nothing, for input that is known to be even.
            throw_on_early_termination: raise on all ranks as soon as one runs out.
        """
        return Join(
            [self],
            enable,
            throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """The hook that runs on a joined rank. Takes `divide_by_initial_world_size`."""
        return DDPJoinHook(self, kwargs.get("divide_by_initial_world_size", True))

    @property
    def join_device(self) -> torch.device:
        return self.device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        return self.process_group

    @property
    def _distributed_rank(self) -> int:
        return dist.get_rank(self.process_group)

    def _sync_final_model(self, is_last_joiner: bool) -> None:
        """Give all ranks the model of the last rank that joined."""
        self._authoritative_rank = self._find_common_rank(self._distributed_rank, is_last_joiner)
        sync_module_states(
            self.module,
            self.process_group,
            message_bytes=self.broadcast_bucket_size,
            src=self._authoritative_rank,
            ignored=self.parameters_to_ignore,
            include_buffers=self.forward_sync_buffers,
        )


TorchDDP.register(DistributedDataParallel)


def _parameters_to_manage(
    module: nn.Module, ignored: set[str], *, all_are_delayed: bool
) -> list[Tensor]:
    """The parameters of `module` that are not ignored, whether they require gradients or not.

    Raises:
        RuntimeError: none requires a gradient, or one has no shape yet.
    """
    params: list[Tensor] = [p for name, p in module.named_parameters() if name not in ignored]
    if not any(param.requires_grad for param in params):
        if not all_are_delayed:
            raise RuntimeError(
                "DistributedDataParallel is not needed when a module doesn't have any parameter "
                "that requires a gradient."
            )
        _log.info("Delay the AllReduce of all parameters.")
    if any(isinstance(param, nn.parameter.UninitializedParameter) for param in params):
        raise RuntimeError(
            "Modules with uninitialized parameters can't be used with `DistributedDataParallel`. "
            "Run a dummy forward pass to correctly initialize the modules"
        )
    return params

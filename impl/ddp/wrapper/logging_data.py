"""DDP's `Logger`, which collects the fields of `_get_ddp_logging_data()` under torch's names.

Fields fall into three groups: what is fixed at construction, what the last sampled iteration was
like, and whether something went wrong.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from impl.ddp.buckets.bucket import Bucket
from impl.ddp.timing import Moment, SampledTimes
from impl.torch_private import debug_is_detail, debug_is_on, gloo_thread_count

logger = logging.getLogger(__name__)

_NCCL_VARIABLES = (
    "NCCL_SOCKET_IFNAME",
    "TORCH_NCCL_BLOCKING_WAIT",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "NCCL_DEBUG",
    "NCCL_NTHREADS",
    "NCCL_IB_TIMEOUT",
)
_TYPE_NAMES = {
    torch.float32: "float",
    torch.float64: "double",
    torch.float16: "c10::Half",
    torch.bfloat16: "c10::BFloat16",
    torch.complex32: "c10::complex<c10::Half>",
    torch.complex64: "c10::complex<float>",
    torch.complex128: "c10::complex<double>",
}
# (duration field, its running average, from, to)
_DURATIONS = (
    ("forward_compute_time", Moment.FORWARD_START, Moment.BACKWARD_COMPUTE_START),
    ("backward_compute_time", Moment.BACKWARD_COMPUTE_START, Moment.BACKWARD_COMPUTE_END),
    ("backward_comm_time", Moment.BACKWARD_COMM_START, Moment.BACKWARD_COMM_END),
    ("backward_compute_comm_overlap_time", Moment.BACKWARD_COMM_START, Moment.BACKWARD_COMPUTE_END),
)
_MOMENTS = (
    ("forward_compute_time_start", Moment.FORWARD_START),
    ("backward_compute_time_start", Moment.BACKWARD_COMPUTE_START),
    ("backward_comm_time_start", Moment.BACKWARD_COMM_START),
    ("backward_compute_time_end", Moment.BACKWARD_COMPUTE_END),
    ("backward_comm_time_end", Moment.BACKWARD_COMM_END),
)


class Observed(Protocol):
    """What the logger asks of a reducer."""

    @property
    def params(self) -> Sequence[Tensor]: ...

    @property
    def process_group(self) -> dist.ProcessGroup: ...

    @property
    def buckets(self) -> Sequence[Bucket]: ...

    @property
    def bucket_bytes_cap(self) -> int: ...

    @property
    def find_unused_parameters(self) -> bool: ...

    @property
    def gradient_as_bucket_view(self) -> bool: ...

    @property
    def static_graph(self) -> bool: ...

    @property
    def is_multi_device_module(self) -> bool: ...

    @property
    def has_rebuilt_buckets(self) -> bool: ...

    @property
    def iteration(self) -> int: ...

    @property
    def reduced_bucket_count(self) -> int: ...

    @property
    def unused_params(self) -> Sequence[int]: ...

    @property
    def ready_order(self) -> Sequence[int]: ...

    @property
    def timer(self) -> SampledTimes | None: ...

    def samples_this_iteration(self) -> bool: ...

    def _ddp_graph_static(self) -> bool: ...


@dataclass
class DDPLoggingData:
    """The fields, strings and numbers apart, as in torch."""

    strs_map: dict[str, str] = field(default_factory=dict)
    ints_map: dict[str, int] = field(default_factory=dict)


class Logger:
    """Collects the fields. Torch's `Logger` has the same methods."""

    def __init__(self, reducer: Observed) -> None:
        self._reducer = reducer
        self._data = DDPLoggingData()
        self._sampled_count = 0

    def set_construction_data_and_log(
        self,
        module_name: str,
        device_ids: Sequence[int],
        output_device: int,
        broadcast_buffers: bool,
        has_sync_bn: bool,
        static_graph: bool,
    ) -> None:
        """Fill in what is known once DDP is constructed.

        Args:
            module_name: class of the wrapped module.
            device_ids: DDP's argument, as indices.
            output_device: an index, or -1.
            broadcast_buffers: whether forward synchronises buffers.
            has_sync_bn: whether the module contains a SyncBatchNorm.
            static_graph: DDP's argument.
        """
        reducer = self._reducer
        if static_graph:
            self._set_static_graph()
        ints, strs = self._data.ints_map, self._data.strs_map
        strs["module_name"] = module_name
        strs["device_ids"] = _join(device_ids)
        strs["backend_name"] = reducer.process_group.name()
        strs["bucket_sizes"] = _join(bucket.nbytes for bucket in reducer.buckets)
        strs["dtypes"] = _join(sorted({_type_name(param.dtype) for param in reducer.params}))
        ints["world_size"] = reducer.process_group.size()
        ints["rank"] = reducer.process_group.rank()
        ints["iteration"] = 0
        ints["is_multi_device_module"] = int(reducer.is_multi_device_module)
        ints["num_parameter_tensors"] = len(reducer.params)
        ints["total_parameter_size_bytes"] = sum(_nbytes(param) for param in reducer.params)
        ints["output_device"] = output_device
        ints["broadcast_buffers"] = int(broadcast_buffers)
        ints["has_sync_bn"] = int(has_sync_bn)
        ints["bucket_cap_bytes"] = reducer.bucket_bytes_cap
        ints["find_unused_parameters"] = int(reducer.find_unused_parameters)
        ints["gradient_as_bucket_view"] = int(reducer.gradient_as_bucket_view)
        self._set_environment(strs["backend_name"])
        if debug_is_on():
            fields = "\n".join(f"{name}: {value}" for name, value in [*ints.items(), *strs.items()])
            logger.info("[Rank %d]: DDP Initialized with: \n%s", ints["rank"], fields)

    def _set_environment(self, backend_name: str) -> None:
        strs = self._data.strs_map
        names = ["MASTER_PORT", "MASTER_ADDR", "TORCH_DISTRIBUTED_DEBUG", "CUDA_VISIBLE_DEVICES"]
        if backend_name == "nccl":
            names += _NCCL_VARIABLES
        if backend_name == "gloo":
            names += ["GLOO_SOCKET_IFNAME", "GLOO_DEVICE_TRANSPORT"]
            thread_count = gloo_thread_count(self._reducer.process_group)
            if thread_count is not None:
                self._data.ints_map["gloo_num_threads"] = thread_count
        for name in names:
            strs[name.removeprefix("TORCH_").lower() if "NCCL" in name else name.lower()] = (
                os.environ.get(name, "N/A")
            )

    def set_runtime_stats_and_log(self) -> None:
        """Describe the iteration that ended; called at the beginning of the next one."""
        reducer = self._reducer
        if not reducer.samples_this_iteration():
            return
        self._sampled_count += 1
        ints, strs = self._data.ints_map, self._data.strs_map
        ints["iteration"] = reducer.iteration
        ints["unused_parameter_size"] = sum(
            _nbytes(reducer.params[index]) for index in reducer.unused_params
        )
        ints["num_buckets_reduced"] = reducer.reduced_bucket_count
        if ints.get("has_rebuilt_buckets", 0) != int(reducer.has_rebuilt_buckets):
            strs["rebuilt_bucket_sizes"] = _join(bucket.nbytes for bucket in reducer.buckets)
            strs["rebuilt_per_bucket_param_indices"] = _join(
                " ".join(str(index) for index in bucket.param_indices) for bucket in reducer.buckets
            )
        ints["has_rebuilt_buckets"] = int(reducer.has_rebuilt_buckets)
        if reducer.ready_order:
            strs["prev_iteration_grad_ready_order_indices"] = _join(reducer.ready_order)
        if reducer.timer is not None:
            self._set_times(reducer.timer)
        if debug_is_detail():
            logger.info("%s", self)

    def _set_times(self, timer: SampledTimes) -> None:
        """Times of the sampled iteration alone, and averages over all that were sampled."""
        ints = self._data.ints_map
        for name, start, end in _DURATIONS:
            elapsed_ns = timer.elapsed_ns(start, end)
            average = ints.setdefault(f"avg_{name}", 0)
            ints[name] = 0
            if elapsed_ns is not None:
                ints[name] = elapsed_ns
                past = average * (self._sampled_count - 1)
                ints[f"avg_{name}"] = (past + elapsed_ns) // self._sampled_count
        for name, event in _MOMENTS:
            ints[name] = timer.wall_ns(event) or 0

    def set_error_and_log(self, error: str) -> None:
        """Note that DDP is about to raise."""
        self._data.ints_map["has_error"] = 1
        self._data.strs_map["error"] = error
        self._data.ints_map["iteration"] = self._reducer.iteration

    def _get_ddp_logging_data(self) -> DDPLoggingData:
        data = DDPLoggingData(dict(self._data.strs_map), dict(self._data.ints_map))
        if self._reducer.iteration > 0 and not self._reducer.static_graph:
            data.ints_map["can_set_static_graph"] = int(self._reducer._ddp_graph_static())
        return data

    def _set_comm_hook_name(self, comm_hook: str) -> None:
        self._data.strs_map["comm_hook"] = comm_hook

    def _set_uneven_input_join(self) -> None:
        self._data.ints_map["join_uneven_inputs"] = 1

    def _set_static_graph(self) -> None:
        self._data.ints_map["static_graph"] = int(self._reducer.static_graph)

    def __str__(self) -> str:
        ints, strs = self._data.ints_map, self._data.strs_map
        lines = [
            f"[Rank {ints['rank']} / {ints['world_size']}] [before iteration {ints['iteration']}] "
            f"Training {strs['module_name']} "
            f"unused_parameter_size={ints.get('unused_parameter_size', 0)}",
            f"Avg forward compute time: {ints.get('avg_forward_compute_time', 0)}",
            f"Avg backward compute time: {ints.get('avg_backward_compute_time', 0)}",
            f"Avg backward comm. time: {ints.get('avg_backward_comm_time', 0)}",
            "Avg backward comm/comp overlap time: "
            f"{ints.get('avg_backward_compute_comm_overlap_time', 0)}",
        ]
        if strs.get("comm_hook"):
            lines.append(f"Gradient comm. hook: {strs['comm_hook']}")
        if ints.get("join_uneven_inputs"):
            lines.append("Uneven input detection with join() enabled.")
        return "\n ".join(lines)


def _join(values: Iterable[Any]) -> str:
    return ", ".join(str(value) for value in values)


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _type_name(dtype: torch.dtype) -> str:
    return _TYPE_NAMES.get(dtype, str(dtype).removeprefix("torch."))

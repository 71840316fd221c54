"""Distributed data parallelism: `DistributedDataParallel` and the reducer behind it.

Reading order: bucketing, layout, readiness (what is decided), then backward_pass (when), reduction
and grad_copy (what is done), then reducer (what torch can ask of it) and api (how it is wrapped
around a module).
"""

from impl.ddp.buckets.assignment import compute_bucket_assignment_by_size
from impl.ddp.buckets.bucket import GradBucket
from impl.ddp.iteration.reducer import Reducer
from impl.ddp.wrapper.api import DistributedDataParallel
from impl.ddp.wrapper.buffer_sync import BufferCommHookLocation
from impl.ddp.wrapper.logging_data import Logger
from impl.ddp.wrapper.module_sync import broadcast_coalesced
from impl.ddp.wrapper.verification import verify_params_across_processes

__all__ = [
    "BufferCommHookLocation",
    "DistributedDataParallel",
    "GradBucket",
    "Logger",
    "Reducer",
    "broadcast_coalesced",
    "compute_bucket_assignment_by_size",
    "verify_params_across_processes",
]

"""Distributed data parallelism: `DistributedDataParallel` and the reducer behind it.

    messages, parameters, timing           words, names and clocks for all of it
    buckets/                               which gradient goes where
    iteration/                             one backward pass: what may be reduced, and doing it
    wrapper/                               the module around a user's module

Reading order: buckets.assignment, buckets.layout, iteration.readiness (what is decided), then
iteration.backward_pass (when), iteration.reduction and iteration.grad_copy (what is done), then
iteration.reducer (what torch can ask of it, and whether buckets are rebuilt) and wrapper.api.
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

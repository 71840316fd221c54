"""Device abstraction (CPU, CUDA): streams, events, futures, pinned memory, storages, time marks.

    storage       frees and allocates a tensor's storage in place
    handle        `DeviceHandle`: what the rest of impl asks of a device
    host          the CPU, on which streams hold collectives that go on in the background
    accelerator   CUDA, every device with streams like its own, and devices without streams
    choice        the process's handle of each device

Everything that is stream-ordered goes through a `DeviceHandle`; no other folder calls `torch.cuda`,
resizes a storage or starts a collective of FSDP. So there is one place to read for the ordering
rules, and one thing to replace in order to check them (a handle that records every read and write
and runs the queued work in another legal order, `impl.testing.device`).
"""

from impl.device.accelerator import AcceleratorHandle, QueueHandle, StreamMark
from impl.device.choice import handle_for, handle_of, substituted_handle, types_served
from impl.device.handle import DeviceHandle, Event, Stream, TimeMark
from impl.device.host import HostHandle, HostMark, HostStream
from impl.device.storage import storage_numel

__all__ = [
    "AcceleratorHandle",
    "DeviceHandle",
    "Event",
    "HostHandle",
    "HostMark",
    "HostStream",
    "QueueHandle",
    "Stream",
    "StreamMark",
    "TimeMark",
    "handle_for",
    "handle_of",
    "storage_numel",
    "substituted_handle",
    "types_served",
]

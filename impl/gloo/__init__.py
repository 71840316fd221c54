"""ProcessGroupGloo in Python. Importing this package registers the backend "pygloo".

    import impl.gloo
    dist.init_process_group("pygloo", ...)

It serves CPU and CUDA, and the accelerator that torch has when this package is imported: one that a
package of its own brings (`torch.npu`) must be imported before.

    options        what a user can choose about a group
    requests/      arguments of a call: checks, options, ReduceOps, dispatch
    memory/        from tensors of any layout and device to flat memory, and back
    connect/       from a store to connected ranks
    flight_recorder  the newest operations of the process, for a look after a hang
    queue/         order, threads, and the `Work` that callers hold
    operations/    the collectives and messages
    process_group  the class that torch calls

Reading order: process_group, operations, queue, memory, requests, connect.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from impl.device import types_served
from impl.gloo.options import BACKEND_NAME, Options
from impl.gloo.process_group import ProcessGroupGloo

__all__ = ["Options", "ProcessGroupGloo"]


def _create(given: Any, options: Options | None) -> ProcessGroupGloo:
    """For `init_process_group` and `new_group`; `given` is torch's `_DistributedBackendOptions`."""
    if options is None:
        options = Options(given.timeout)
    elif not isinstance(options, Options):
        raise TypeError(
            f"pg_options for backend {BACKEND_NAME!r} must be impl.gloo.Options, "
            f"not {type(options).__name__}"
        )
    else:
        options = options.__copy__()
        options._timeout = given.timeout
    options.global_ranks_in_group = given.global_ranks_in_group
    options.group_name = given.group_id
    return ProcessGroupGloo(
        given.store,
        given.group_rank,
        given.group_size,
        options=options,
        name=given.group_id,
        is_connected=not getattr(given, "enable_reconfigure", False),
    )


dist.Backend.register_backend(
    BACKEND_NAME, _create, extended_api=True, devices=list(types_served())
)

"""What a group must leave as it is: the state of the process around it."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from conformance import Me, Ranks, assert_that, covers, world_sizes
from conformance.cases.collectives.perform import issue
from conformance.cases.groups.starting import start
from conformance.oracle.collectives import Call, before

OPS = ("all_reduce", "broadcast", "all_gather", "reduce", "reduce_scatter_tensor")


def process_state(device: torch.device) -> Mapping[str, Any]:
    """Name -> something that is equal as long as nobody has changed it."""
    state: dict[str, Any] = {
        "torch's random generator": torch.get_rng_state().tolist(),
        "Python's random generator": random.getstate(),
        "NumPy's random generator": repr(np.random.get_state()),
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "default dtype": torch.get_default_dtype(),
        "number of threads": torch.get_num_threads(),
        "working directory": os.getcwd(),
        "environment": dict(os.environ),
        "signal handlers": {s: signal.getsignal(s) for s in signal.valid_signals()},
    }
    if device.type == "cuda":
        state["CUDA's random generator"] = torch.cuda.get_rng_state(device).tolist()
        state["current device"] = torch.cuda.current_device()
    return state


def what_changes(me: Me) -> list[str]:
    """Names of what was another thing at the end, of a default group with some operations."""
    # What torch itself does once in a process is no doing of the group's.
    torch.ones(2, device=me.device, requires_grad=True).sum().backward()
    seen = process_state(me.device)
    start(me, "surroundings")
    for op in OPS:
        if me.target.lacks((f"op:{op}",)):
            continue
        for async_op in (False, True):
            buffers = before(Call(op), me.rank, me.world_size)
            given = [x.to(me.device) for x in buffers.given]
            taken = [x.to(me.device) for x in buffers.taken]
            work = issue(Call(op), given, taken, async_op=async_op)
            if async_op:
                work.wait()
    dist.new_group()
    dist.all_reduce(torch.ones(1, device=me.device))  # nobody leaves while others still connect
    dist.destroy_process_group()
    now = process_state(me.device)
    return [name for name, before_it in seen.items() if now[name] != before_it]


@covers("work/leaves-the-process-alone")
@world_sizes(2)
def test_the_process_is_left_alone(bare_ranks: Ranks) -> None:
    for rank, changed in enumerate(bare_ranks.run(what_changes)):
        assert_that(not changed, f"rank {rank} finds changed: {', '.join(changed)}", rank)

"""A sharded layer that a checkpoint recomputes gets inputs that are not cast

Promised: torch docs, MixedPrecisionPolicy: with cast_forward_inputs, the inputs of a module's
forward are cast to param_dtype.

Happens: the forward that a checkpoint runs again in the backward gets them as they were, so that
what it computes differs from what the first one did: CheckpointError.

Severity: wrong error
Taste: no
Upstream: https://github.com/pytorch/pytorch/issues/159359
"""
# deviations: fully_shard/recomputation-casts
# shows: metadata

import signal
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint


def run(rank, init_method):
    signal.alarm(30)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    layer = torch.nn.Linear(3, 2)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    fully_shard(layer, mesh=dist.init_device_mesh("cpu", (2,)), mp_policy=policy)
    x = torch.ones(1, 3, requires_grad=True)
    checkpoint(layer, x, use_reentrant=False).sum().backward()


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        lines = [line for line in str(error).splitlines() if "metadata" in line]
        raise SystemExit(f"wrong: {(lines or str(error).splitlines())[-1].strip()}") from None
    print("as promised")

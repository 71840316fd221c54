"""GradBucket.gradients() permutes the gradients of channels-last parameters

Promised: torch docs, GradBucket.gradients: a list of the gradients of the parameters in the
bucket.

Happens: they are views of the buffer in row-major order, whatever the order of its elements.

Severity: silent wrong data
Taste: no
Upstream: none found, searched in November 2026
"""
# deviations: comm_hooks/bucket/gradients-of-channels-last
# shows: gradients differ

import signal
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel


def hook(seen, bucket):
    seen.extend(grad.clone() for grad in bucket.gradients())
    return allreduce_hook(dist.group.WORLD, bucket)


def run(rank, init_method):
    signal.alarm(30)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    conv = torch.nn.Conv2d(2, 2, 2, bias=False).to(memory_format=torch.channels_last)
    model = DistributedDataParallel(conv)
    seen = []
    model.register_comm_hook(seen, hook)
    model(torch.arange(8.0).reshape(1, 2, 2, 2)).sum().backward()
    got, want = seen[0].flatten().tolist(), conv.weight.grad.flatten().tolist()
    assert got == want, f"gradients differ: {got[:8]}, not {want[:8]}"


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")

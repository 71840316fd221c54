"""all_reduce of tensors of different sizes ends the process

Promised: an error on each rank, as NCCL and Gloo's own checks of sizes intend.

Happens: a message longer than expected is an exception in Gloo's loop thread: SIGABRT.

Severity: crash
Taste: no
Upstream: https://github.com/pytorch/gloo/pull/456
"""
# deviations: mismatch/numel
# shows: signal SIGABRT

import signal
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run(rank, init_method):
    signal.alarm(30)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    try:
        dist.all_reduce(torch.ones(100 + 100 * rank))
        dist.barrier()
    except RuntimeError:
        pass


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")

"""all_reduce of sparse tensors whose dtypes differ between ranks ends a process

Promised: an error, as for ranks whose sparse tensors differ in shape.

Happens: the values are a message longer than the other rank's tensor, of which Gloo's loop thread
dies: SIGABRT.

Severity: crash
Taste: no
Upstream: https://github.com/pytorch/gloo/pull/456
"""
# deviations: sparse/dtypes-differ
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
    x = torch.ones(2, dtype=[torch.float32, torch.float64][rank]).to_sparse()
    try:
        dist.all_reduce(x)
        dist.barrier()
    except (ValueError, RuntimeError):
        pass


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")

"""get_future() of reduce_scatter_tensor of CUDA tensors is not implemented on Gloo

Promised: torch.distributed docs, Work.get_future.

Happens: before torch 2.13 "Work::getFuture not implemented." (on the CPU it is so in all
versions).

Severity: missing
Taste: no
Upstream: none found, searched in November 2026
"""
# deviations: cuda/futures
# shows: getFuture not implemented
# device: cuda

import signal
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run(rank, init_method):
    signal.alarm(30)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    out, x = torch.zeros(2, device="cuda"), torch.ones(4, device="cuda")
    dist.reduce_scatter_tensor(out, x, async_op=True).get_future().wait()


if __name__ == "__main__":
    if not torch.cuda.is_available():
        raise SystemExit("not run: there is no CUDA device")
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="spawn")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")

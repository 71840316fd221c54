"""The output of reduce_scatter_tensor is not written if its Work is dropped

Promised: the Work of any other collective may be dropped: the operation ends all the same.

Happens: wait() alone copies the sum into the output; without it the output is as it was.

Severity: silent wrong data
Taste: perhaps: reading an output without wait() is a mistake, but a barrier follows here
Upstream: none found, searched in November 2026
"""
# deviations: reduce_scatter_tensor/dropped-handles
# shows: y is

import signal
import tempfile
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run(rank, init_method):
    signal.alarm(30)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    y = torch.zeros(1)
    dist.reduce_scatter_tensor(y, torch.ones(2), async_op=True)
    dist.barrier()
    time.sleep(1)
    assert y.tolist() == [2], f"y is {y.tolist()}"


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")

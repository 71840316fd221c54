"""DDP of modules whose shapes differ: one rank raises, the others hang

Promised: _verify_param_shape_across_processes: "verifies that params are the same across
processes", an error on each rank.

Happens: rank 0's sizes are broadcast; a rank that differs raises, and rank 0 goes on and waits
for it.

Severity: hang
Taste: no
Upstream: https://github.com/pytorch/pytorch/issues/76449
"""
# deviations: ddp/verify/shapes-on-every-rank
# shows: rank 0 was not told

import signal
import tempfile
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel


def run(rank, init_method):
    signal.alarm(30)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    start = time.monotonic()
    try:
        DistributedDataParallel(torch.nn.Linear(2, 2 + rank))
    except RuntimeError as error:
        if rank == 0 and "size" not in str(error):
            text = f"rank 0 was not told in {time.monotonic() - start:.0f} s: {error}"
            raise AssertionError(" ".join(text.split())) from None
    if rank == 1:
        time.sleep(15)


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")

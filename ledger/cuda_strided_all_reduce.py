"""all_reduce of a strided CUDA view on Gloo reads and writes the wrong memory

Promised: torch.distributed docs, all_reduce: "operates in-place" on the tensor.

Happens: Gloo copies the view to the host with its gaps, and takes the copy for dense memory.

Severity: silent wrong data
Taste: no
Upstream: https://github.com/pytorch/pytorch/issues/192920
"""
# deviations: cuda/strided
# shows: x is
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
    x = torch.arange(8.0, device="cuda")[::2]
    dist.all_reduce(x)
    assert x.tolist() == [0, 4, 8, 12], f"x is {x.tolist()}"


if __name__ == "__main__":
    if not torch.cuda.is_available():
        raise SystemExit("not run: there is no CUDA device")
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="spawn")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")

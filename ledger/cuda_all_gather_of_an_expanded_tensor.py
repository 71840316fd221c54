"""all_gather of an expanded CUDA tensor on Gloo raises

Promised: the input of all_gather is only read.

Happens: the copy on the host is expanded too and refuses to be written to: "more than one element
of the written-to tensor".

Severity: wrong error
Taste: no
Upstream: none known
"""
# deviations: gather/strided on cuda
# shows: written-to tensor
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
    outs = [torch.zeros(3, 2, device="cuda") for _ in range(2)]
    dist.all_gather(outs, torch.ones(3, 1, device="cuda").expand(3, 2))


if __name__ == "__main__":
    if not torch.cuda.is_available():
        raise SystemExit("not run: there is no CUDA device")
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="spawn")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")

"""isend of a CUDA tensor on Gloo ends the process

Promised: Gloo copies CUDA tensors through the host in collectives; for messages it refuses them
with an error.

Happens: the address of the device's memory goes to a socket, which refuses it. Once the receiver
has come later than the sender, that is thrown in Gloo's loop thread: SIGABRT.

Severity: crash
Taste: no
Upstream: none found, searched in November 2026
"""
# deviations: p2p/* on cuda
# shows: signal SIGABRT
# device: cuda

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
    x = torch.ones(4, device="cuda")
    time.sleep(rank)
    try:
        dist.isend(x, 1).wait() if rank == 0 else dist.irecv(x, 0).wait()
        dist.barrier()
    except (ValueError, RuntimeError):
        pass


if __name__ == "__main__":
    if not torch.cuda.is_available():
        raise SystemExit("not run: there is no CUDA device")
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="spawn")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")

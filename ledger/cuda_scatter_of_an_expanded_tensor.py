"""scatter of expanded CUDA tensors on Gloo raises on the root, and the others hang

Promised: the inputs of scatter are only read.

Happens: the root's copy on the host is expanded too and refuses to be written to, while the
others wait for the root.

Severity: hang
Taste: no
Upstream: none known
"""
# deviations: scatter/strided on cuda
# shows: written-to tensor|[Tt]imed out
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
    out = torch.zeros(3, 2, device="cuda")
    x = torch.ones(3, 1, device="cuda").expand(3, 2)
    dist.scatter(out, [x, x] if rank == 0 else None)


if __name__ == "__main__":
    if not torch.cuda.is_available():
        raise SystemExit("not run: there is no CUDA device")
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="spawn")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")

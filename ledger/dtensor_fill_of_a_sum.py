"""fill_ of a DTensor that is a pending sum fills each rank's share

Promised: torch docs, torch.distributed.tensor: a DTensor computes what the whole tensor would.

Happens: every rank's share gets the whole value, and their sum is a multiple of it.

Severity: silent wrong data
Taste: no
Upstream: none found, searched in November 2026
"""
# deviations: dtensor/in-place/sums
# shows: filled with 3, it is 6

import signal
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial


def run(rank, init_method):
    signal.alarm(60)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    mesh = init_device_mesh("cpu", (2,))
    x = DTensor.from_local(torch.ones(1), mesh, [Partial()])
    got = x.fill_(3).full_tensor().item()
    assert got == 3, f"filled with 3, it is {got:g}"


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")

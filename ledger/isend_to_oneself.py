"""isend to the own rank is refused by Gloo

Promised: torch.distributed docs, isend: "Unlike send, which is blocking, isend allows src == dst
rank, i.e. send to self."

Happens: RuntimeError, since Gloo has no pair that connects a rank with itself.

Severity: missing
Taste: no
Upstream: https://github.com/pytorch/pytorch/issues/83912
"""
# deviations: p2p/to-oneself
# shows: Error

import signal
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run(rank, init_method):
    signal.alarm(30)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    x = torch.zeros(1)
    handles = [dist.isend(torch.ones(1), rank), dist.irecv(x, rank)]
    [handle.wait() for handle in handles]
    assert x.item() == 1, f"x is {x.tolist()}"


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")

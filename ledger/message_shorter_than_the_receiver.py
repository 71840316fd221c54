"""recv accepts a message that is shorter than its tensor

Promised: a mismatch is an error: a longer message is noticed (and ends the process), and so is
one in any collective that has sizes.

Happens: the end of the tensor keeps what it had, without a word.

Severity: silent wrong data
Taste: perhaps: MPI allows shorter messages, but tells how much came; torch does not
Upstream: none found, searched in November 2026
"""
# deviations: p2p/shorter-message
# shows: x is \[1.0, 1.0, 7.0, 7.0\]

import signal
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run(rank, init_method):
    signal.alarm(30)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    if rank == 0:
        dist.send(torch.ones(2), 1)
    else:
        x = torch.full((4,), 7.0)
        dist.recv(x, 0)
        raise AssertionError(f"x is {x.tolist()}")
    dist.barrier()


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")

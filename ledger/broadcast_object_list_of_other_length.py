"""broadcast_object_list with a shorter list on a receiver ends the receiver's process

Promised: torch.distributed docs, broadcast_object_list: "each rank must provide lists of equal
sizes"; otherwise an error.

Happens: the list of sizes is a message longer than the receiver's tensor, of which Gloo's loop
thread dies: SIGABRT.

Severity: crash
Taste: no
Upstream: https://github.com/pytorch/gloo/pull/456
"""
# deviations: broadcast_object_list/lists-of-differing-lengths
# shows: signal SIGABRT

import signal
import tempfile
from datetime import timedelta

import torch.distributed as dist
import torch.multiprocessing as mp


def run(rank, init_method):
    signal.alarm(30)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    try:
        dist.broadcast_object_list([0] * (3 if rank == 0 else 2))
        dist.barrier()
    except (ValueError, RuntimeError):
        pass


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")

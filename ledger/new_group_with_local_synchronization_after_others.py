"""new_group(use_local_synchronization=True) hangs if ranks were in other groups before

Promised: torch.distributed docs, new_group: with use_local_synchronization only the members need
to call it.

Happens: the name counts the groups that a rank is in, so the ranks wait under different names.
Mended in torch 2.15.

Severity: hang
Taste: no
Upstream: https://github.com/pytorch/pytorch/issues/189073
"""
# deviations: new_group/different-memberships-synchronized-locally
# shows: [Tt]imeout|[Tt]imed out|SIGALRM

import signal
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run(rank, init_method):
    signal.alarm(15)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    dist.new_group([0])
    group = dist.new_group([0, 1], use_local_synchronization=True)
    dist.all_reduce(torch.ones(1), group=group)


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")

"""all_to_all of tensors of different sizes is refused by Gloo

Promised: torch.distributed docs, all_to_all: the example has tensors of different sizes in each
list.

Happens: Gloo (which has all_to_all since torch 2.12) refuses them.

Severity: missing
Taste: no
Upstream: none found, searched in November 2026
Related: https://github.com/pytorch/pytorch/issues/88245
"""
# deviations: all_to_all/uneven
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
    outputs = [torch.zeros(rank + 1) for _ in range(2)]
    dist.all_to_all(outputs, [torch.ones(1), torch.ones(2)])


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")

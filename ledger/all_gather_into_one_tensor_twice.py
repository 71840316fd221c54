"""all_gather accepts the same tensor as the output of two ranks

Promised: an error: one tensor cannot hold two results.

Happens: it holds what came last, without a word.

Severity: silent wrong data
Taste: no
Upstream: https://github.com/pytorch/pytorch/issues/14632
"""
# deviations: all_gather/aliased-outputs
# shows: not a word

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
    try:
        dist.all_gather([x, x], torch.tensor([float(rank)]))
    except (ValueError, RuntimeError):
        pass
    else:
        raise AssertionError(f"not a word; x is {x.tolist()}")


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")

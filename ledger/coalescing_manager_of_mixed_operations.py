"""The coalescing manager takes operations of several kinds for the first one's

Promised: _coalescing_manager: "requires all collectives to be the same type".

Happens: before torch 2.12 the second operation is run as the first one: wrong results without a
word.

Severity: silent wrong data
Taste: no
Upstream: https://github.com/pytorch/pytorch/pull/175573
"""
# deviations: coalescing/mixed-refused
# shows: y is

import signal
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run(rank, init_method):
    signal.alarm(30)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    x, y = torch.ones(2), torch.zeros(4)
    try:
        with dist._coalescing_manager():
            dist.all_reduce(x)
            dist.all_gather_into_tensor(y, x)
    except (AssertionError, ValueError, RuntimeError):
        pass  # refused
    else:
        assert y.tolist() in ([1] * 4, [2] * 4), f"y is {y.tolist()}"


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")

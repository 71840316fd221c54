"""Work.exception() raises a TypeError

Promised: torch.distributed docs, Work.exception: the exception, or None.

Happens: before torch 2.13: TypeError, std::exception_ptr is of a type that Python does not know.

Severity: wrong error
Taste: no
Upstream: https://github.com/pytorch/pytorch/issues/147312
"""
# deviations: work/success
# shows: TypeError|pybind11

import signal
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run(rank, init_method):
    signal.alarm(30)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    work = dist.all_reduce(torch.ones(1), async_op=True)
    work.wait()
    assert work.exception() is None


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")

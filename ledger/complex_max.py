"""reduce and reduce_scatter raise RuntimeError, not ValueError, for MAX of complex tensors

Promised: torch.distributed.all_reduce: "all_reduce does not support MAX on complex tensors", a
ValueError.

Happens: reduce, reduce_scatter and reduce_scatter_tensor call the backend, which raises a
RuntimeError about a dtype.

Severity: wrong error
Taste: yes: both are errors; only the type and text differ
Upstream: https://github.com/pytorch/pytorch/issues/179633
"""
# deviations: reductions/complex-refused-as-values
# shows: RuntimeError

import signal
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run(rank, init_method):
    signal.alarm(30)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    x = torch.ones(2, dtype=torch.complex64)
    try:
        dist.reduce(x, 0, dist.ReduceOp.MAX)
    except ValueError:
        pass


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")

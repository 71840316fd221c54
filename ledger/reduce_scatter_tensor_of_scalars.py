"""reduce_scatter_tensor into a zero-dimensional tensor ends the process

Promised: torch.distributed docs: the input may be a stack of the outputs; a stack of scalars is
one-dimensional. Otherwise an error.

Happens: Gloo divides by a dimension that is not there, and the process dies.

Severity: crash
Taste: no
Upstream: none known
"""
# deviations: reduce_scatter_tensor/zero-dimensional
# shows: signal SIG

import signal
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run(rank, init_method):
    signal.alarm(30)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    y = torch.tensor(0.0)
    try:
        dist.reduce_scatter_tensor(y, torch.ones(2))
    except (ValueError, RuntimeError):
        pass  # refused


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")

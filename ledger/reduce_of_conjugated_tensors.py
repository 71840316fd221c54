"""reduce and reduce_scatter of conjugated tensors leave the result in a copy

Promised: torch docs, Tensor.resolve_conj: conjugation is lazy and never visible in values;
all_reduce gets it right or refuses.

Happens: x is as it was.

Severity: silent wrong data
Taste: no
Upstream: none found, searched in November 2026
"""
# deviations: conjugated/reduced
# shows: x is \[-1j\]

import signal
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run(rank, init_method):
    signal.alarm(30)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    x = torch.tensor([1j]).conj()
    dist.reduce(x, 0)
    assert rank == 1 or x.tolist() == [-2j], f"x is {x.tolist()}"


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")

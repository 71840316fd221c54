"""The functional all_to_all_single refuses complex tensors on gloo

Promised: its docstring: "Each process splits input tensor and then scatters the split list to all
processes"; nothing is said of dtypes. torch.distributed.all_to_all_single moves complex tensors,
and the other functional collectives do, too.

Happens: torch.distributed's function passes complex tensors on as pairs of reals, the functional
one as they are, and gloo raises "Invalid scalar type".

Severity: missing
Taste: no
Upstream: none found, searched in November 2026
"""
# deviations: functional/complex-all-to-all
# shows: Invalid scalar type

import signal
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.multiprocessing as mp


def run(rank, init_method):
    signal.alarm(60)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    x = torch.full((2,), rank + 1j)
    y = functional.all_to_all_single(x, None, None, dist.group.WORLD) * 1
    assert y.tolist() == [1j, 1 + 1j], f"y is {y.tolist()}"


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")

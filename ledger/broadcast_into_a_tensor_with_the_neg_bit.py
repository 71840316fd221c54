"""A collective into a tensor with the neg bit does not write it

Promised: torch docs, Tensor.resolve_neg: the bit is lazy negation; operators that do not support
it materialize the tensor and write back.

Happens: the dispatcher hands Gloo a copy, the result stays in the copy, and x is unchanged.

Severity: silent wrong data
Taste: no
Upstream: none found, searched in November 2026
"""
# deviations: negated/written
# shows: x is \[-?1.0\]

import signal
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run(rank, init_method):
    signal.alarm(30)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    x = torch.tensor([1j * (rank + 1)]).conj().imag
    dist.broadcast(x, 1)
    assert x.tolist() == [-2], f"x is {x.tolist()}"


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")

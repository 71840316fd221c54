"""scatter of tensors with the neg bit sends them with the wrong sign

Promised: torch docs, Tensor.resolve_neg: the bit is a lazy negation and never visible in values.

Happens: the memory of the tensors in scatter_list is sent as it is.

Severity: silent wrong data
Taste: no
Upstream: none found, searched in November 2026
"""
# deviations: negated/scatter
# shows: y is \[2.0\]

import signal
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run(rank, init_method):
    signal.alarm(30)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    y = torch.zeros(1)
    x = torch.tensor([1 + 2j]).conj().imag  # -2
    dist.scatter(y, [x, x] if rank == 0 else None)
    assert y.tolist() == [-2], f"y is {y.tolist()}"


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")

"""reduce_scatter is wrong if its output is another tensor of the list

Promised: nothing in the documentation forbids it; torch's own FSDP reduces into views of its
input, and NCCL reads before it writes.

Happens: the list is reduced tensor by tensor, and an input was overwritten before it was read.

Severity: silent wrong data
Taste: perhaps: outputs that overlap inputs are not promised either
Upstream: none known
"""
# deviations: reduce_scatter/into-another-input
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
    xs = [torch.tensor([1.0]), torch.tensor([10.0])]
    y = xs[1 - rank]
    dist.reduce_scatter(y, xs)
    assert y.item() == [2, 20][rank], f"y is {y.tolist()}"


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")

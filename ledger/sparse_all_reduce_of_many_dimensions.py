"""all_reduce of a sparse tensor of more than four dimensions fails an internal assertion

Promised: all_reduce of sparse tensors is supported by Gloo; no number of dimensions is named.

Happens: ValueError or RuntimeError from an internal check of the metadata, which has room for
four sparse and four dense dimensions.

Severity: missing
Taste: no
Upstream: https://github.com/pytorch/pytorch/pull/19146
"""
# deviations: sparse/many-dimensions
# shows: INTERNAL ASSERT|Error

import signal
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run(rank, init_method):
    signal.alarm(30)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    dist.all_reduce(torch.zeros(1, 1, 1, 1, 1).to_sparse())


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")

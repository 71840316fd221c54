"""_set_sparse_metadata refuses the rows that are used

Promised: DistributedDataParallel._set_sparse_metadata: rows of sparse gradients that are known
beforehand are not exchanged.

Happens: right rows are refused: "Sparse metadata and gradient size mismatch".

Severity: wrong error
Taste: perhaps: the function is private
Upstream: none known
"""
# deviations: ddp/sparse/metadata
# shows: size mismatch

import signal
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel


def run(rank, init_method):
    signal.alarm(30)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Embedding(4, 2, sparse=True)))
    rows = torch.tensor([1, 3])
    model._set_sparse_metadata({"0.weight": rows})
    model(rows).sum().backward()


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")

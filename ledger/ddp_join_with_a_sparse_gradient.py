"""DDP's join() raises on a rank without input if a gradient is sparse

Promised: torch docs, join: ranks that have joined take part in the collectives of the others,
without a word of sparse gradients.

Happens: the joined rank makes zeros like the bucket of the sparse gradient, which has no tensor
between backward passes, and raises RuntimeError 'Expected a proper Tensor but got None'. The other
ranks wait for it.

Severity: missing
Taste: no
Upstream: none known
"""
# deviations: ddp/join/sparse
# shows: Expected a proper Tensor|bucket.lengths.empty

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
    model = DistributedDataParallel(torch.nn.Embedding(4, 2, sparse=True))
    with model.join():
        for _ in range(1 + rank):
            model.zero_grad()
            model(torch.tensor([rank])).sum().backward()


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")

"""DDP raises if a rank has no sparse gradient in a step

Promised: torch docs, DistributedDataParallel, find_unused_parameters: a rank that does not use a
parameter contributes zeros; with dense gradients it does.

Happens: RuntimeError "Expected sparse gradient to be defined".

Severity: wrong error
Taste: no
Upstream: https://github.com/pytorch/pytorch/issues/80496
"""
# deviations: ddp/sparse/unused-on-a-rank
# shows: [Ss]parse gradient|closed by peer

import signal
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.layer = torch.nn.Embedding(3, 1, sparse=True), torch.nn.Linear(1, 1)

    def forward(self, x, with_words):
        return self.layer(x) + (self.words(torch.tensor([0])) if with_words else 0)


def run(rank, init_method):
    signal.alarm(30)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    model = DistributedDataParallel(Model(), find_unused_parameters=True)
    model(torch.ones(1, 1), rank == 0).sum().backward()


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")

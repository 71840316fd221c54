"""DDP divides gradients twice if two sparse embeddings are added

Promised: DistributedDataParallel averages gradients; with dense embeddings it does.

Happens: values of sparse gradients are divided where they are, which is the memory of other
gradients too: on 2 ranks a part is a quarter, not a half.

Cause: Reducer::mark_variable_ready_sparse takes the gradient for its bucket and divides it in
place (bucket.gradients.div_). The outputs of the embeddings are added, so autograd hands one and
the same tensor to both, whose gradients and that of the layer beside them share its memory. A
division into new memory, as copy_grad_to_bucket does for dense gradients, mends it.

Severity: silent wrong data
Taste: no
Upstream: none found, searched in November 2026
"""
# deviations: ddp/sparse/added-embeddings
# shows: gradient is wrong

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
        self.words, self.places = [torch.nn.Embedding(2, 1, sparse=True) for _ in range(2)]
        self.layer = torch.nn.Linear(1, 1)

    def forward(self, x):
        return self.layer(x) + self.words(torch.tensor([0])) + self.places(torch.tensor([1]))


def run(rank, init_method):
    signal.alarm(30)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    model = DistributedDataParallel(Model())
    (model(torch.ones(1, 1)) * torch.ones(1, 1)).sum().backward()
    grads = [p.grad.to_dense().sum().item() for p in model.parameters()]
    assert grads == [1] * 4, f"a gradient is wrong: {grads}, not all 1"


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")

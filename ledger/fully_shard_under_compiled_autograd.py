"""fully_shard does not reduce gradients under compiled autograd, without a word

Promised: torch docs, fully_shard: gradients are averaged over the ranks and sharded. DDP refuses
compiled autograd with an error, as it cannot keep the same promise there.

Happens: each rank keeps the gradients of its own batch, of parameters that stay whole.

Severity: silent wrong data
Taste: no
Upstream: none found, searched in November 2026; related: pytorch#174863
"""
# deviations: compile/fully_shard/compiled-autograd
# shows: gradient

import signal
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.fsdp import fully_shard


def run(rank, init_method):
    signal.alarm(60)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    model = fully_shard(torch.nn.Linear(2, 2), mesh=dist.init_device_mesh("cpu", (2,)))
    loss = model(torch.full((1, 2), rank + 1.0)).sum()
    with torch._dynamo.config.patch(compiled_autograd=True):
        try:
            torch.compile(torch.Tensor.backward, backend="eager")(loss)
        except Exception:
            return  # it is refused
    gradient = model.weight.grad
    assert hasattr(gradient, "to_local"), f"gradient {gradient.tolist()} of rank {rank} alone"


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")

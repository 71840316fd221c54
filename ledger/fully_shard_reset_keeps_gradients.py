"""reset_iter_state of a sharded module keeps the gradients that it says are lost

Promised: torch docs, FSDPModule.reset_iter_state: "the failed iteration's gradients are lost,
including HSDP partial-reduce-accumulation state and no_sync grad-accumulation state".

Happens: gradients of whole parameters stay where the backward has left them. The next backward
adds its own, and reduces the sum, without a word. So do gradients of layers whose backward was
over when another one's raised.

Severity: silent wrong data
Taste: no
Upstream: none found, searched in November 2026
"""
# deviations: fully_shard/backward-that-raises
# shows: gradient

import signal
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.fsdp import fully_shard


def run(rank, init_method):
    signal.alarm(30)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    model = fully_shard(torch.nn.Linear(2, 2), mesh=dist.init_device_mesh("cpu", (2,)))
    if not hasattr(model, "reset_iter_state"):
        return
    x = torch.ones(1, 2)
    model.set_requires_gradient_sync(False)
    model(x).sum().backward()
    model.reset_iter_state()
    model.set_requires_gradient_sync(True)
    model(x).sum().backward()
    gradient = model.weight.grad.to_local()
    assert (gradient == 1).all(), f"gradient {gradient.tolist()}, not ones"


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")

"""loss_parallel stays on after an exception, and an inner block ends the outer one

Promised: torch docs, loss_parallel: a context manager, within which the loss is computed in
parallel.

Happens: it is not ended when its block raises, so that all later losses of the process are computed
by it; and the end of a block inside another one ends both, and then raises KeyError.

Severity: silent wrong data
Taste: no
Upstream: none found, searched in November 2026
"""
# deviations: tp/loss/ends
# shows: after the block has raised

import signal
import tempfile
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn import functional


def run(rank, init_method):
    signal.alarm(60)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    mesh = init_device_mesh("cpu", (2,))
    logits = distribute_tensor(torch.zeros(2, 4), mesh, [Shard(1)])
    with suppress(KeyError), loss_parallel():
        raise KeyError
    try:  # only loss_parallel takes a target that is no DTensor
        functional.cross_entropy(logits, torch.tensor([0, 1]))
    except Exception:
        return
    raise AssertionError("loss_parallel is on after the block has raised")


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")

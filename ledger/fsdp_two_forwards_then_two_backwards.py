"""FSDP fails in the second of two backwards that follow two forwards

Promised: as the bare module and DDP: a discriminator is trained on real and on made data, with
two forwards and two backwards.

Happens: the first backward ends the iteration; the next one finds parameters freed and does not
gather them: RuntimeError.

Severity: wrong error
Taste: no
Upstream: https://github.com/pytorch/pytorch/issues/136861
"""
# deviations: fsdp/several-backwards
# shows: RuntimeError

import signal
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.fsdp import FullyShardedDataParallel


def run(rank, init_method):
    signal.alarm(30)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    cpu = torch.device("cpu")
    layers = [torch.nn.Linear(2, 2) for _ in range(3)]
    layers[1] = FullyShardedDataParallel(layers[1], device_id=cpu)
    model = FullyShardedDataParallel(torch.nn.Sequential(*layers), device_id=cpu)
    losses = [model(torch.ones(1, 2)).pow(2).sum() for _ in range(2)]
    for loss in losses:
        loss.backward()


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")

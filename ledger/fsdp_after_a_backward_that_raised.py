"""FSDP cannot be saved or used after a backward that raised

Promised: a backward that raises leaves the model usable once gradients are cleared; the bare
module is.

Happens: the units stay in the state of a backward: state_dict() and the next forward raise
AssertionError.

Severity: wrong error
Taste: no
Upstream: none found, searched in November 2026
Related: https://github.com/mosaicml/llm-foundry/issues/247
"""
# deviations: fsdp/backward-that-raises
# shows: Expects the handle training to be IDLE

import contextlib
import signal
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.fsdp import FullyShardedDataParallel


def fail(grad):
    raise KeyError("not today")


class Moody(torch.nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        y.register_hook(fail)
        return super().forward(y)


def run(rank, init_method):
    signal.alarm(30)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    model = FullyShardedDataParallel(Moody(2, 2), device_id=torch.device("cpu"))
    with contextlib.suppress(KeyError):
        model(torch.ones(1, 2, requires_grad=True)).sum().backward()
    model.state_dict()


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")

"""An FSDP model whose last forward had no backward is never freed

Promised: a model that nothing refers to is freed; the bare module and DDP are.

Happens: the hook on the flat parameter's gradient accumulator holds the unit, which holds the
accumulator: a cycle through autograd that no collector sees.

Severity: leak
Taste: no
Upstream: none found, searched in November 2026
Related: https://github.com/pytorch/pytorch/pull/182774
"""
# deviations: fsdp/freed-with-the-model
# shows: still there

import gc
import signal
import tempfile
import weakref
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.fsdp import FullyShardedDataParallel


def run(rank, init_method):
    signal.alarm(30)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    model = FullyShardedDataParallel(torch.nn.Linear(2, 2), device_id=torch.device("cpu"))
    model(torch.ones(1, 2))
    seen = weakref.ref(model)
    del model
    gc.collect()
    assert seen() is None, "the model is still there"


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")

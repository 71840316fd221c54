"""summon_full_params(writeback=False) changes the model after a forward under no_grad

Promised: torch docs, summon_full_params, writeback=False: modifications are discarded.

Happens: what a forward under no_grad has gathered stays in use, with the changes of each rank:
the next forward computes with them.

Severity: silent wrong data
Taste: no
Upstream: none found, searched in November 2026
"""
# deviations: fsdp/summon-after-forward
# shows: output is

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
    module = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.ones_(module.weight)
    model = FullyShardedDataParallel(module, device_id=torch.device("cpu"))
    with torch.no_grad():
        model(torch.ones(1, 2))
        with FullyShardedDataParallel.summon_full_params(model, writeback=False):
            module.weight.zero_()
        output = model(torch.ones(1, 2)).item()
    assert output == 2, f"the output is {output}, not 2"


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")

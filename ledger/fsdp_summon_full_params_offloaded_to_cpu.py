"""summon_full_params with offload_to_cpu shows freed memory if the model is on the CPU

Promised: torch docs, summon_full_params, offload_to_cpu: full parameters are shown on the CPU.

Happens: what is on the CPU already is not copied, and its memory is freed before it is shown: an
error, or with use_orig_params the process dies.

Severity: crash
Taste: no
Upstream: https://github.com/pytorch/pytorch/issues/188989
"""
# deviations: fsdp/summon-on-cpu
# shows: signal SIG|has 0 bytes

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
    model = FullyShardedDataParallel(
        torch.nn.Linear(2000, 2000), use_orig_params=True, device_id=torch.device("cpu")
    )
    with FullyShardedDataParallel.summon_full_params(model, offload_to_cpu=True, writeback=False):
        [p.sum().item() for p in model.parameters()]
        sizes = [p.untyped_storage().size() for p in model.parameters()]
        assert all(sizes), f"the storage of parameters has {sizes[0]} bytes"


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")

"""FSDP.optim_state_dict with offload_to_cpu, its default, has other values on the CPU

Promised: torch docs, FullOptimStateDictConfig: the full optimizer state; offload_to_cpu is about
where it is.

Happens: with use_orig_params state that is on the CPU is not copied, and its memory is used
again: exp_avg holds other values.

Severity: silent wrong data
Taste: no
Upstream: none found, searched in November 2026
"""
# deviations: fsdp/full-optimizer-state-offloaded
# shows: exp_avg is

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
        torch.nn.Linear(4, 4), use_orig_params=True, device_id=torch.device("cpu")
    )
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    state = FullyShardedDataParallel.optim_state_dict(model, optimizer)["state"]
    average = state["weight"]["exp_avg"].flatten()
    assert torch.allclose(average, torch.tensor(0.1)), f"exp_avg is {average.tolist()}, not 0.1"


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")

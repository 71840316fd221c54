"""load_state_dict(assign=True) of FSDP loads nothing, without a word

Promised: torch docs, Module.load_state_dict, assign: tensors of the state dict become the
module's.

Happens: they take the place of views of the unsharded parameters and are forgotten with them: the
old values stay.

Severity: silent wrong data
Taste: no
Upstream: none found, searched in November 2026
"""
# deviations: fsdp/assigned-state-dict
# shows: weights are

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
    model = FullyShardedDataParallel(torch.nn.Linear(2, 2), device_id=torch.device("cpu"))
    state = {"weight": torch.full((2, 2), 7.0), "bias": torch.full((2,), 7.0)}
    model.load_state_dict(state, assign=True)
    with FullyShardedDataParallel.summon_full_params(model):
        weights = model.weight.flatten().tolist()
    assert weights == [7] * 4, f"weights are {weights}, not 7"


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")

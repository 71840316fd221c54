"""FSDP does not cast the inputs of a unit in a checkpoint's recomputation

Promised: torch docs, MixedPrecision, cast_forward_inputs: the unit casts its inputs.
torch.utils.checkpoint runs the same forward again.

Happens: in a recomputation with use_reentrant=False the unit takes its inputs for cast already:
other tensors are saved, and checkpoint raises (or with determinism_check="none" gradients are
computed from other values).

Severity: wrong error
Taste: no
Upstream: none found, searched in November 2026
Related: https://github.com/pytorch/pytorch/issues/159359
"""
# deviations: fsdp/recomputed-casts
# shows: CheckpointError|Recomputed values|metadata|dtype

import signal
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
from torch.utils.checkpoint import checkpoint


class Outer(torch.nn.Module):
    def __init__(self, unit):
        super().__init__()
        self.unit, self.layer = unit, torch.nn.Linear(2, 2)

    def forward(self, x):
        return self.layer(checkpoint(self.unit, self.layer(x), use_reentrant=False).float())


def run(rank, init_method):
    signal.alarm(30)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    cpu = torch.device("cpu")
    low = MixedPrecision(torch.bfloat16, torch.float32, cast_forward_inputs=True)
    layers = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Tanh())
    unit = FullyShardedDataParallel(layers, mixed_precision=low, device_id=cpu)
    model = FullyShardedDataParallel(Outer(unit), device_id=cpu)
    model(torch.ones(1, 2)).sum().backward()


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")

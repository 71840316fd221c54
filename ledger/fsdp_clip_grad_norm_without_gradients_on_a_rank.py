"""FSDP.clip_grad_norm_ gives the first step's norm for ever on a rank without gradients

Promised: torch docs, clip_grad_norm_: the total norm of the parameters.

Happens: a rank whose shard has no gradients contributes one and the same tensor, which the first
step's result overwrites: with the maximum norm it never falls again.

Cause: _get_grad_norm returns self._zero_scalar itself if there are no gradients ("Reuse a tensor
for zero"), and clip_grad_norm_ with norm_type inf all-reduces into it. From then on the zero is
the largest norm that there was. A clone of it, or torch.zeros, mends it; with other norm types the
power makes a new tensor.

Severity: silent wrong data
Taste: no
Upstream: none found, searched in November 2026
"""
# deviations: fsdp/norm-without-gradients
# shows: norms are

import signal
import tempfile
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.fsdp import FullyShardedDataParallel


def run(rank, init_method):
    signal.alarm(30)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    warnings.simplefilter("ignore")  # a rank says that it has no gradients
    m = torch.nn.Module()
    m.trained, m.frozen = [torch.nn.Parameter(torch.ones(4)) for _ in range(2)]
    m.frozen.requires_grad_(False)
    m.forward = lambda x: (m.trained * x + 0 * m.frozen).sum()
    model = FullyShardedDataParallel(m, use_orig_params=True, device_id=torch.device("cpu"))
    norms = []
    for size in (5.0, 1.0):
        model.zero_grad()
        model(torch.full((4,), size)).backward()
        norms.append(model.clip_grad_norm_(1e9, torch.inf).item())
    assert norms == [5, 1], f"norms are {norms}, not 5 and 1"


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")

"""fully_shard does not reduce gradients in param_dtype if there is no reduce_dtype

Promised: until torch 2.14, "reduce_dtype: if None but param_dtype is not None, then this takes on
the param_dtype value" (MixedPrecisionPolicy).

Happens: torch 2.15 reduces them in float32: twice the bytes. Its documentation says so, as a
change of this version.

Severity: missing
Taste: yes: the change is intended and documented
Upstream: none found, searched in November 2026
Related: https://github.com/pytorch/pytorch/pull/194434
"""
# deviations: fully_shard/scatter-dtype
# shows: gradient is

import signal
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


def run(rank, init_method):
    signal.alarm(30)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model = fully_shard(torch.nn.Linear(1, 2, bias=False), mp_policy=policy)
    model(torch.tensor([[256.0, 1.0][rank]])).sum().backward()
    got = model.weight.grad.to_local().item()  # bfloat16 has no 257, the sum
    assert got in (128, 129), f"the gradient is {got}"


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="spawn")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")

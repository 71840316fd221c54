"""Functional all_gather of a CUDA tensor on Gloo ends the process

Promised: all_gather of a CUDA tensor on Gloo works; so should all_gather_coalesced, or raise.

Happens: all_gather_coalesced and all_gather_into_tensor_coalesced, which functional collectives
and DTensor use too, read the device's memory from the host: SIGSEGV.

Severity: crash
Taste: no
Upstream: https://github.com/pytorch/pytorch/issues/152645
"""
# deviations: all_gather_coalesced/values on cuda
# shows: signal SIGSEGV
# device: cuda

import signal
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.multiprocessing as mp


def run(rank, init_method):
    signal.alarm(30)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    y = functional.all_gather_tensor(torch.ones(3, device="cuda"), 0, dist.group.WORLD)
    assert y.tolist() == [1] * 6, f"y is {y.tolist()}"


if __name__ == "__main__":
    if not torch.cuda.is_available():
        raise SystemExit("not run: there is no CUDA device")
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="spawn")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")

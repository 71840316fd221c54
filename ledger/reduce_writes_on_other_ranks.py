"""reduce leaves partial sums in the tensors of ranks that are not the destination

Promised: torch.distributed docs, reduce: "Only the process with rank dst is going to receive the
final result."

Happens: on Gloo the tensors of the other ranks are overwritten in part.

Severity: silent wrong data
Taste: perhaps: the documentation calls the argument "Input and output of the collective"
Upstream: https://github.com/pytorch/pytorch/issues/76527
"""
# deviations: reduce/other-ranks-untouched
# shows: x is

import signal
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run(rank, init_method):
    signal.alarm(30)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    x = torch.ones(4)
    dist.reduce(x, 0)
    assert rank == 0 or x.tolist() == [1] * 4, f"x is {x.tolist()}"


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")

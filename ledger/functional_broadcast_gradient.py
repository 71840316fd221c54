"""The gradient of the functional broadcast is each rank's own

Promised: the gradient of what comes from the source goes back to the source, as in
torch.distributed.nn.functional.broadcast; or no gradient, with an error.

Happens: backward goes through the copy alone: the source has its own gradient instead of the sum,
and the others have one for an input that was not used.

Severity: silent wrong data
Taste: no
Upstream: https://github.com/pytorch/pytorch/issues/152127
"""
# deviations: functional/broadcast-gradient
# shows: x\.grad is \[1

import signal
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.multiprocessing as mp


def run(rank, init_method):
    signal.alarm(60)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    x = torch.ones(2, requires_grad=True)
    try:
        functional.broadcast(x, 0, dist.group.WORLD).sum().backward()
    except RuntimeError:
        return  # refused
    want = [0, 0] if rank else [2, 2]
    assert x.grad.tolist() == want, f"x.grad is {x.grad.tolist()} on rank {rank}"


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")

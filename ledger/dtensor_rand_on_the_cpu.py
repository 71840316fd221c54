"""dt.rand and dt.randn fail on the CPU without a word

Promised: torch docs, torch.distributed.tensor.rand: it returns a DTensor on each rank, for any
mesh.

Happens: AssertionError without a text, behind the warning that support may not be complete.

Severity: missing
Taste: no
Upstream: none found, searched in November 2026
"""
# deviations: dtensor/random/factories
# shows: AssertionError

import signal
import tempfile
import warnings
from datetime import timedelta

import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed import tensor as dt
from torch.distributed.device_mesh import init_device_mesh


def run(rank, init_method):
    signal.alarm(60)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    warnings.simplefilter("ignore")
    x = dt.rand(4, device_mesh=init_device_mesh("cpu", (2,)), placements=[dt.Shard(0)])
    assert x.full_tensor().shape == (4,)


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")

"""Waiting for a reduce_scatter leaves its Work in the registry of unwaited works

Promised: Work.wait() takes an operation out of the registry that wait_tensor() looks in; with
all_reduce it does.

Happens: the Work of reduce_scatter_tensor and reduce_scatter stays registered (and keeps its
tensors alive).

Severity: leak
Taste: no
Upstream: none known
"""
# deviations: wait_tensor/forgets
# shows: 1 works? left

import signal
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed._functional_collectives import allow_inflight_collective_as_graph_input_ctx


def run(rank, init_method):
    signal.alarm(30)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    with allow_inflight_collective_as_graph_input_ctx():
        work = dist.reduce_scatter_tensor(torch.zeros(2), torch.ones(4), async_op=True)
        work.wait()
        left = torch._C._distributed_c10d._get_work_registry_size()
    assert left == 0, f"{left} work left"


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")

"""dcp.load gives values of two saves after the second was torn

Promised: torch docs, FileSystemWriter, overwrite: an existing checkpoint is overwritten; one is
there once its metadata are, which are written last.

Happens: the metadata of the first save stand while its data are overwritten. If a rank dies in
between, loading gives new values of some ranks and old ones of others, without an error.

Severity: silent wrong data
Taste: no
Upstream: none found, searched in November 2026
Related: https://github.com/Lightning-AI/pytorch-lightning/issues/20012
"""
# deviations: dcp/torn-overwrite
# shows: values of both

import os
import signal
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp


def run(rank, init_method, folder):
    signal.alarm(30)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    for value in (1.0, 2.0):
        planner = dcp.DefaultSavePlanner()
        if value == 2 and rank == 1:
            planner.finish_plan = lambda _: os._exit(0)  # it dies before it writes
        try:
            dcp.save({f"w{rank}": torch.full((2,), value)}, checkpoint_id=folder, planner=planner)
        except BaseException:
            pass  # rank 0 hears of it
    into = {"w0": torch.zeros(2), "w1": torch.zeros(2)}
    dcp.load(into, checkpoint_id=folder, no_dist=True)
    seen = sorted({x.item() for w in into.values() for x in w})
    assert len(seen) == 1, f"values of both: {seen}"


if __name__ == "__main__":
    try:
        folder = tempfile.mkdtemp()
        mp.start_processes(run, (f"file://{folder}/store", folder), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")

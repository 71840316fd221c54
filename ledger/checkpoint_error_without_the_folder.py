"""The error of dcp.load does not say where there is no checkpoint

Promised: nothing; an error about a file names it, as open does.

Happens: metadata that cannot be read are told as 'metadata is None'.

Severity: missing
Taste: no
Upstream: none found, searched in November 2026
"""
# deviations: dcp/no-checkpoint-is-named
# shows: the folder is not named

import signal
import tempfile
from datetime import timedelta

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp


def run(rank, init_method, folder):
    signal.alarm(30)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    try:
        dcp.load({"w": 0}, checkpoint_id=f"{folder}/nothing here")
    except dcp.api.CheckpointException as error:
        said = str(error)
    assert "nothing here" in said, "the folder is not named"


if __name__ == "__main__":
    try:
        folder = tempfile.mkdtemp()
        mp.start_processes(run, (f"file://{folder}/store", folder), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")

"""Gloo's flight recorder has no messages

Promised: the form has a flag and a number for messages between two ranks, and NCCL records them.

Happens: send, recv, isend and irecv on gloo leave no entry. Of ranks that wait for messages, as in
a pipeline that hangs, nothing is known.

Severity: missing
Taste: perhaps: nothing says that gloo records messages
Upstream: none found, searched in November 2026
"""
# deviations: flight_recorder/messages
# shows: 0 entries of a message

import pickle
import signal
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch._C import _distributed_c10d as c10d


def run(rank, init_method):
    signal.alarm(60)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    (dist.recv if rank else dist.send)(torch.ones(2), 1 - rank)
    entries = pickle.loads(c10d._dump_fr_trace())["entries"]
    assert len(entries) == 1, f"{len(entries)} entries of a message"


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")

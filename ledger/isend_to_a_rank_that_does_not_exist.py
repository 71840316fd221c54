"""isend and irecv with a rank beyond the world read past Gloo's table of pairs

Promised: an invalid rank is an error in Python (send, broadcast and others raise ValueError or
RuntimeError).

Happens: ProcessGroupGloo does not check the rank; the process dies of a signal, or hangs.

Severity: crash
Taste: no
Upstream: https://github.com/pytorch/pytorch/issues/83912
"""
# deviations: p2p/peer-out-of-range
# shows: signal SIG|[Tt]imed out

import signal
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run(rank, init_method):
    signal.alarm(30)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    try:
        dist.irecv(torch.ones(1), 1 << 30).wait()
    except (ValueError, IndexError, RuntimeError) as error:
        if "imed out" in str(error):
            raise


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")

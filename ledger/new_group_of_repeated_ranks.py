"""new_group accepts a rank twice

Promised: an error; ranks that do not exist and too many ranks are refused.

Happens: before torch 2.12 not noticed: a group of two members, one of which does not exist.

Severity: silent wrong data
Taste: no
Upstream: none found, searched in November 2026
"""
# deviations: new_group/bad-ranks
# shows: not a word|[Tt]imed out|Error:

import signal
import tempfile
from datetime import timedelta

import torch.distributed as dist
import torch.multiprocessing as mp


def run(rank, init_method):
    signal.alarm(30)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    try:
        dist.new_group([0, 0])
    except ValueError:
        pass
    else:
        raise AssertionError("not a word")


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")

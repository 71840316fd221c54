"""Functional collectives take no list of lists of ranks, and permute_tensor no group's name

Promised: torch.distributed._functional_collectives, RANK_TYPES and all docstrings: a list of
lists of ranks is a group for each of them.

Happens: the list is looked up as one of ranks, and not found; permute_tensor does not know names.

Severity: missing
Taste: no
Upstream: none found, searched in November 2026
"""
# deviations: functional/every-form-of-groups
# shows: ValueError|Error

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
    y = functional.all_reduce(torch.ones(2), "sum", [[0, 1]]) * 1
    assert y.tolist() == [2, 2], f"y is {y.tolist()}"


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")

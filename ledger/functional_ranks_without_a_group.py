"""Ranks of which there is no group are refused by an error without a text

Promised: an error says what is wrong.

Happens: ValueError without a word, for a list of ranks for which no group was made.

Severity: wrong error
Taste: yes: how much a message should tell
Upstream: none found, searched in November 2026
"""
# deviations: functional/unknown-ranks
# shows: no text

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
    try:
        functional.all_reduce(torch.ones(2), "sum", [0, 7])
    except ValueError as error:
        said = str(error)
    assert said, "a ValueError with no text"


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")

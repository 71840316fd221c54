"""split_group of a default group that is bound to no device is accepted since torch 2.15

Promised: until torch 2.14, RuntimeError if the parent is bound to no device.

Happens: since torch 2.15 there is no error: a group on Gloo can be split, as the documentation of
2.15 says. The change is intended; a program that relied on the error sees it.

Severity: wrong error
Taste: yes: torch 2.15 can do more, and says so
Upstream: https://github.com/pytorch/pytorch/pull/189103
"""
# deviations: split_group/arguments
# shows: not a word

import signal
import tempfile
from datetime import timedelta

import torch.distributed as dist
import torch.multiprocessing as mp


def run(rank, init_method):
    signal.alarm(30)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    try:
        dist.split_group(split_ranks=[[0]])
    except RuntimeError:
        pass
    else:
        raise AssertionError("not a word")


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")

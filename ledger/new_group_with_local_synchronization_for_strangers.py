"""new_group(use_local_synchronization=True) gives a stranger NON_GROUP_MEMBER instead of None

Promised: torch.distributed docs, new_group: a rank that is not in the group "will return None"
with use_local_synchronization.

Happens: since torch 2.14 it returns GroupMember.NON_GROUP_MEMBER, as without local
synchronization.

Severity: wrong error
Taste: yes: it may be the documentation that is late
Upstream: none found, searched in November 2026
Related: https://github.com/pytorch/pytorch/pull/122574
"""
# deviations: new_group/local-synchronization
# shows: got

import signal
import tempfile
from datetime import timedelta

import torch.distributed as dist
import torch.multiprocessing as mp


def run(rank, init_method):
    signal.alarm(30)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    group = dist.new_group([0], use_local_synchronization=True)
    assert rank == 0 or group is None, f"rank 1 got {group}"


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")

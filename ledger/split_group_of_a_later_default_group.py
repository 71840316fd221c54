"""split_group ends the process if the default group is not the first one

Promised: ProcessGroup.split_group makes a group of the given ranks; it works in the first default
group of a process.

Happens: the group looks up its ranks in a list that is filled for the first group alone: the
process dies.

Severity: crash
Taste: no
Upstream: https://github.com/pytorch/pytorch/pull/192106
"""
# deviations: split_group/parts
# shows: signal SIG|Connection closed by peer

import signal
import tempfile
from datetime import timedelta

import torch.distributed as dist
import torch.multiprocessing as mp


def run(rank, init_method):
    signal.alarm(30)  # ends a rank that hangs
    timeout = timedelta(seconds=10)
    dist.init_process_group("gloo", init_method, timeout, 2, rank)
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method + "2", timeout, 2, rank)
    group = dist.group.WORLD.split_group([0, 1], timeout, None, "both", "both")
    assert group.size() == 2


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")

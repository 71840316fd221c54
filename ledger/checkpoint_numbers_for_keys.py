"""dcp.load puts a value beside the number that is its key

Promised: torch docs, torch.distributed.checkpoint.load: the state dict is loaded in place.

Happens: keys of nested dicts become texts. Tensors find their place, other values are set under the
text: the value under the number stays what it was. Optimizers' state dicts have such keys.

Severity: silent wrong data
Taste: no
Upstream: none found, searched in November 2026
Related: https://github.com/pytorch/pytorch/issues/137327
"""
# deviations: dcp/numbers-for-keys
# shows: '0': 5

import signal
import tempfile
from datetime import timedelta

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp


def run(rank, init_method, folder):
    signal.alarm(30)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    dcp.save({"state": {0: 5}}, checkpoint_id=folder)
    into = {"state": {0: -1}}
    dcp.load(into, checkpoint_id=folder)
    assert into == {"state": {0: 5}}, f"loaded {into}"


if __name__ == "__main__":
    try:
        folder = tempfile.mkdtemp()
        mp.start_processes(run, (f"file://{folder}/store", folder), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")

"""Setting sharding_strategy on an FSDP instance has no effect

Promised: sharding_strategy is a public attribute; setting it has effect or is refused.

Happens: it is not read again, and the old strategy goes on.

Severity: silent wrong data
Taste: yes: nothing says that it may be set
Upstream: none known
"""
# deviations: fsdp/strategy-changes
# shows: not a word

import signal
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy


def run(rank, init_method):
    signal.alarm(30)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    model = FullyShardedDataParallel(torch.nn.Linear(2, 2), device_id=torch.device("cpu"))
    try:
        model.sharding_strategy = ShardingStrategy.NO_SHARD
    except (AttributeError, RuntimeError):
        pass
    else:
        whole = next(model.parameters()).numel() == 6
        assert whole, "not a word, and parameters are still sharded"


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")

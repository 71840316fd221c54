"""FSDP.state_dict_type is not put back if its block is left by an exception

Promised: torch docs, state_dict_type: "a context manager to set the state_dict_type of all the
descendant FSDP modules"; it ends with its block.

Happens: the type is put back after the block, not in a finally clause, and stays.

Severity: silent wrong data
Taste: no
Upstream: none found, searched in November 2026
"""
# deviations: fsdp/state-dict-types-after-error
# shows: the type is

import contextlib
import signal
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType


def run(rank, init_method):
    signal.alarm(30)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    FSDP, sharded = FullyShardedDataParallel, StateDictType.SHARDED_STATE_DICT
    model = FSDP(torch.nn.Linear(2, 2), device_id=torch.device("cpu"))
    with contextlib.suppress(KeyError), FSDP.state_dict_type(model, sharded):
        raise KeyError
    kind = FSDP.get_state_dict_type(model).state_dict_type
    assert kind == StateDictType.FULL_STATE_DICT, f"the type is {kind} afterwards"


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")

"""A LOCAL_STATE_DICT of FSDP with use_orig_params cannot be loaded

Promised: LOCAL_STATE_DICT can be saved and loaded; with use_orig_params=False it can.

Happens: the entries of flat parameters are unexpected keys to the module that has the original
ones.

Severity: wrong error
Taste: no
Upstream: https://github.com/pytorch/pytorch/issues/102667
"""
# deviations: fsdp/local-state-dict-original
# shows: Error|_flat_param

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
    FSDP = FullyShardedDataParallel
    model = FSDP(torch.nn.Linear(2, 2), use_orig_params=True, device_id=torch.device("cpu"))
    with FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
        model.load_state_dict(model.state_dict())


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")

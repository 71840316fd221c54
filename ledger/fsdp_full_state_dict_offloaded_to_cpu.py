"""A full state dict of FSDP with offload_to_cpu holds freed memory if the model is on the CPU

Promised: torch docs, FullStateDictConfig, offload_to_cpu: the tensors are on the CPU; without it
they are right.

Happens: what is on the CPU already is not copied, and its memory is freed with the unsharded
parameters: state_dict() raises.

Severity: wrong error
Taste: no
Upstream: none found, searched in November 2026
"""
# deviations: fsdp/full-state-dict-on-cpu
# shows: weight has|setStorage|Error

import signal
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel, StateDictType


def run(rank, init_method):
    signal.alarm(30)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    model = FullyShardedDataParallel(torch.nn.Linear(2, 2), device_id=torch.device("cpu"))
    config = FullStateDictConfig(offload_to_cpu=True)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, config):
        weight = model.state_dict()["weight"]
    size = weight.untyped_storage().size()
    assert size >= 16, f"weight has {weight.numel()} elements in {size} bytes"


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")

"""Optimizer state of channels-last parameters is permuted by FSDP

Promised: torch docs, optim_state_dict_to_load of optim_state_dict gives the optimizer's own
state.

Happens: state is flattened in row-major order, the parameter in its order in memory: exp_avg
comes back permuted.

Severity: silent wrong data
Taste: no
Upstream: none found, searched in November 2026
Related: https://github.com/NVIDIA/physicsnemo/pull/1597
"""
# deviations: fsdp/optimizer-state-channels-last
# shows: exp_avg came back

import signal
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.fsdp import FullOptimStateDictConfig, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


def run(rank, init_method):
    signal.alarm(30)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    conv = torch.nn.Conv2d(2, 2, 2, bias=False).to(memory_format=torch.channels_last)
    model = FSDP(conv, use_orig_params=True, device_id=torch.device("cpu"))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.arange(8.0).reshape(1, 2, 2, 2)).sum().backward()
    optimizer.step()
    own = optimizer.state_dict()["state"][0]["exp_avg"].clone()
    config = FullOptimStateDictConfig(offload_to_cpu=False)
    FSDP.set_state_dict_type(model, StateDictType.FULL_STATE_DICT, None, config)
    state = FSDP.optim_state_dict(model, optimizer)
    back = FSDP.optim_state_dict_to_load(model, optimizer, state)["state"][0]["exp_avg"]
    assert torch.equal(own, back), f"exp_avg came back as {back.tolist()}, was {own.tolist()}"


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")

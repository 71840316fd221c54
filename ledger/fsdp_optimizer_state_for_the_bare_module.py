"""Optimizer state that FSDP converted for the bare module counts steps too fast

Promised: torch docs, rekey_optim_state_dict: state of FSDP's optimizer can be loaded into the
bare module's.

Happens: all parameters of a unit get one and the same tensor that counts steps, which the next
optimizer counts up once for each.

Severity: silent wrong data
Taste: no
Upstream: none found, searched in November 2026
Related: https://github.com/pytorch/pytorch/pull/96313
"""
# deviations: fsdp/optimizer-state-of-units-and-the-bare-module
# shows: steps are

import signal
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import OptimStateKeyType


def run(rank, init_method):
    signal.alarm(30)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    bare = torch.nn.Linear(2, 2)
    model = FSDP(torch.nn.Linear(2, 2), device_id=torch.device("cpu"))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    state = FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)
    state = FSDP.rekey_optim_state_dict(state, OptimStateKeyType.PARAM_ID, bare)
    optimizer = torch.optim.Adam(bare.parameters())
    optimizer.load_state_dict(state)
    bare(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    steps = [each["step"].item() for each in optimizer.state.values()]
    assert steps == [2, 2], f"steps are {steps}, not 2"


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")

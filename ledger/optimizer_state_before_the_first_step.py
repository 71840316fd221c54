"""get_optimizer_state_dict counts as a step of Adam

Promised: torch docs, get_optimizer_state_dict: returns the state of the optimizer.

Happens: for an optimizer without states it takes a step with a learning rate of zero and leaves the
states: their count is 1, so the corrections of Adam's first real step are those of a second one.

Severity: silent wrong data
Taste: no
Upstream: https://github.com/pytorch/pytorch/issues/164929
"""
# deviations: dcp/state-dict/before-the-first-step
# shows: not those of an optimizer that was not asked

import signal
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict


def run(rank, init_method, folder):
    signal.alarm(30)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    weights = []
    for asks in (True, False):
        model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.ones_(model.weight)
        adam = torch.optim.Adam(model.parameters(), lr=0.1)
        if asks:
            get_optimizer_state_dict(model, adam)
        model(torch.ones(1, 1)).sum().backward()
        adam.step()
        weights.append(model.weight.item())
    assert weights[0] == weights[1], f"{weights}: not those of an optimizer that was not asked"


if __name__ == "__main__":
    try:
        folder = tempfile.mkdtemp()
        mp.start_processes(run, (f"file://{folder}/store", folder), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")

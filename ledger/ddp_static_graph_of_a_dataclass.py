"""DDP with static_graph does not average the first step if forward returns a dataclass

Promised: torch docs, DistributedDataParallel, static_graph: for any graph that does not change.
Without static_graph a dataclass works.

Happens: the first reduction hangs on tensors that are found in the output, and dataclasses are
not opened: gradients stay local.

Severity: silent wrong data
Taste: no
Upstream: none found, searched in November 2026
"""
# deviations: ddp/dataclass-output-of-a-static-graph
# shows: gradient is

import dataclasses
import signal
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel


@dataclasses.dataclass
class Output:
    score: torch.Tensor


class Model(torch.nn.Linear):
    def forward(self, x):
        return Output(super().forward(x))


def run(rank, init_method):
    signal.alarm(30)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    module = Model(1, 1)
    model = DistributedDataParallel(module, static_graph=True)
    model(torch.tensor([[1.0 + 2 * rank]])).score.sum().backward()
    assert module.weight.grad.item() == 2, f"the gradient is {module.weight.grad.item()}, not 2"


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")

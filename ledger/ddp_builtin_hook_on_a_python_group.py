"""The builtin hook FP16_COMPRESS fails on a process group that is written in Python

Promised: torch.distributed supports process groups in Python (register_backend); the builtin
ALLREDUCE hook works on them.

Happens: the hook wants a list of C++ in the future, and a group in Python puts one of Python
there.

Severity: wrong error
Taste: perhaps: builtin hooks are private
Upstream: none found, searched in November 2026
"""
# deviations: comm_hooks/builtin/fp16
# shows: should return TensorList

import signal
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel


class Done(dist.Work):
    wait = lambda self, timeout=None: True

    def get_future(self):
        future = torch.futures.Future()
        future.set_result([torch.ones(2, dtype=torch.float16)])
        return future


class Alone(dist.ProcessGroup):  # a group of one rank
    allreduce = broadcast = lambda self, tensors, *options: Done()

    def allgather(self, outputs, inputs, *options):
        outputs[0][0].copy_(inputs[0])
        return Done()


def run(rank, init_method):
    signal.alarm(30)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 1, rank)
    model = DistributedDataParallel(torch.nn.Linear(1, 1), process_group=Alone(0, 1))
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    model(torch.ones(1, 1)).sum().backward()


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 1, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")

"""convert_sync_batchnorm drops the forward of a subclass of BatchNorm

Promised: torch docs, convert_sync_batchnorm: converts BatchNorm layers; a subclass with more in
its forward should be kept, or there should be a warning.

Happens: it becomes a plain SyncBatchNorm, and its own forward (here a relu) is lost without a
word.

Severity: silent wrong data
Taste: no
Upstream: https://github.com/pytorch/pytorch/issues/187298
"""
# deviations: convert_sync_batchnorm/more-than-batch-norm
# shows: is a SyncBatchNorm

import signal
import tempfile
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


class NormAndRelu(torch.nn.BatchNorm1d):
    def forward(self, x):
        return super().forward(x).relu()


def run(rank, init_method):
    signal.alarm(30)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 2, rank)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        m = torch.nn.SyncBatchNorm.convert_sync_batchnorm(NormAndRelu(2).eval())
    y = m(-torch.ones(2, 2)) if isinstance(m, NormAndRelu) else None
    assert caught or y is not None, f"it is a {type(m).__name__}, without a warning"


if __name__ == "__main__":
    try:
        mp.start_processes(run, (f"file://{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")

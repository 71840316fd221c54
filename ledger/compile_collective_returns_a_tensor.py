"""A compiled all_reduce returns the tensor

Promised: torch docs, all_reduce: None, unless async_op is set, also in a function that is compiled.

Happens: the compiled function returns the tensor where the function itself returns None.

Severity: silent wrong data
Taste: no
Upstream: none found, searched in November 2026
"""
# deviations: compile/in-place
# shows: returned a

import signal
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist


def run(rank, init_method):
    signal.alarm(60)  # ends a rank that hangs
    dist.init_process_group("gloo", init_method, timedelta(seconds=10), 1, rank)
    found = torch.compile(lambda x: dist.all_reduce(x), backend="eager")(torch.ones(2))
    assert found is None, f"returned a {type(found).__name__}"


if __name__ == "__main__":
    try:
        run(0, f"file://{tempfile.mkdtemp()}/store")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")

"""Where a run took place: what a certificate says of the machine and of the software on it."""

from __future__ import annotations

import os
import platform
from typing import Any

import numpy as np
import torch
import torch.distributed as dist


def environment() -> dict[str, Any]:
    """Versions, processor and devices; no names of hosts, people or folders.

    cpus: how many this process may use, which in a container is fewer than the machine has.
    """
    return {
        "torch": torch.__version__,
        "torch_git": str(torch.version.git_version),
        "numpy": np.__version__,
        "python": platform.python_version(),
        "python_implementation": platform.python_implementation(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cpus": len(os.sched_getaffinity(0)),
        "cuda": torch.version.cuda,
        "cuda_devices": [
            torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())
        ],
        "torch_backends": [
            name for name in ("gloo", "mpi", "nccl", "ucc") if dist.is_backend_available(name)
        ],
    }

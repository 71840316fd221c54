"""The environment in a certificate: torch and Python versions, platform, CPU count, devices."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from conformance.harness import devices


def environment(device: str, found: Sequence[str]) -> dict[str, Any]:
    """Versions, processor and devices; no names of hosts, people or folders.

    device: the type of device that the run was on.
    found: the names of its devices, if this process does not know the type.
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
        "cuda_devices": devices.names("cuda"),
        "devices": devices.names(device) or list(found),
        "torch_backends": [
            name for name in sorted(dist.Backend.backend_list) if dist.is_backend_available(name)
        ],
    }

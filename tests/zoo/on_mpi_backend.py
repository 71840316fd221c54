"""The example's backend on MPI, and its buggy twin, for which uint8 is signed.

Importing this module starts MPI, as importing the example does.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.append(str(Path(__file__).parents[2] / "examples" / "targets"))
from mpi_backend import MPIGroup  # found by the line above


class TakesBytesForSigned(MPIGroup):
    """The bug: to MPI, uint8 is a signed number, so 200 is less than 100."""

    def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> dist.Work:
        is_bytes = tensors[0].dtype == torch.uint8
        return super().allreduce(
            [t.view(torch.int8) for t in tensors] if is_bytes else tensors, opts
        )


dist.Backend.register_backend("zoo_mpi", MPIGroup, devices=["cpu"])
dist.Backend.register_backend("zoo_mpi_buggy", TakesBytesForSigned, devices=["cpu"])

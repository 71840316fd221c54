"""Choice by device of what lends memory: `Lender`, `CudaLender` or `CopyLender`."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from impl.device import handle_of
from impl.gloo.memory.cuda_staging import CudaLender
from impl.gloo.memory.host_copies import CopyLender
from impl.gloo.memory.staging import Lender


def lender_for(tensors: Sequence[Tensor]) -> Lender:
    """The lender for tensors that are all on one device."""
    if not tensors:
        return Lender()
    device = handle_of(tensors[0])
    if device.has_streams:
        return CudaLender(device)
    return Lender() if tensors[0].is_cpu else CopyLender()

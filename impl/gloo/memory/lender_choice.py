"""Which lender serves these tensors: the CPU's, or that of their device?"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from impl.gloo.memory.cuda_staging import CudaLender
from impl.gloo.memory.device import handle_for
from impl.gloo.memory.lending import Lender


def lender_for(tensors: Sequence[Tensor]) -> Lender:
    """The lender for tensors that are all on one device."""
    device = handle_for(tensors[0]) if tensors else None
    return Lender() if device is None else CudaLender(device)

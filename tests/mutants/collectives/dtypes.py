"""Mutants of conformance/spec/collectives/dtypes.py."""

from __future__ import annotations

from typing import Any

import torch

from tests.mutants.kit import ForwardingGroup, breaks


@breaks("dtypes/moved", says=r"the bytes of Call\(op='broadcast'.*float16.*is wrong")
class LosesTheNaNPayload(ForwardingGroup):
    """NaN loses its payload on the way."""

    def broadcast(self, tensors: Any, opts: Any) -> Any:
        for tensor in tensors:
            if tensor.is_floating_point():
                tensor.nan_to_num_(nan=0.0)
        return super().broadcast(tensors, opts)


@breaks("dtypes/reduced", says=r"bfloat16.*rank 0 is wrong")
class TakesBfloat16ForFloat16(ForwardingGroup):
    """Numbers of two bytes are added as float16."""

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        as_half = [x.view(torch.float16) if x.dtype is torch.bfloat16 else x for x in tensors]
        return super().allreduce(as_half, opts)

"""Gradient averaging in compiled backward passes, for dynamo's `optimize_ddp = "python_reducer"`.

Compiled autograd traces the hooks below into the backward graph, where the compiler may fuse the
reductions. The reducer stands by.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from impl.torch_private import fuse_compiled_reductions, traced_all_reduce


def average_in_compiled_backward(ddp: Any) -> None:
    """Hook every parameter of `ddp` that requires a gradient.

    Args:
        ddp: a `DistributedDataParallel` under construction.
    """
    fuse_compiled_reductions(ddp.bucket_bytes_cap)

    def average(param: Tensor) -> None:
        if not ddp.require_backward_grad_sync or param.grad is None:
            return
        if ddp._comm_hooks:
            for hook, state in ddp._comm_hooks:
                hook(state, (param.grad, param))
            return
        share = param.grad / ddp.process_group.size()
        param.grad.copy_(traced_all_reduce(share, ddp.process_group))

    for param in ddp._module_parameters:
        if param.requires_grad:
            _keep(ddp, param.register_post_accumulate_grad_hook(average))


def _keep(ddp: nn.Module, handle: Any) -> None:
    handles: list[Any] = ddp.__dict__.setdefault("_accum_grad_hooks", [])
    handles.append(handle)

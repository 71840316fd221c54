"""Delayed all-reduce of chosen parameters' gradients in one buffer, when another one's is ready.

The user names the parameters (`delay_all_reduce_named_params`) and the one whose gradient means
that theirs are complete (`param_to_hook_all_reduce`). They bypass the reducer: their gradients are
views of one buffer from the start, autograd accumulates into it, and one all_reduce averages it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from impl.ddp.wrapper.module_sync import broadcast_coalesced
from impl.torch_private import queue_backward_callback


class DelayedAllReduce:
    """The buffer of the delayed gradients, and its reduction."""

    def __init__(self, params: Sequence[Tensor], trigger: Tensor, group: dist.ProcessGroup) -> None:
        """
        Args:
            params: of one dtype, on one device.
            trigger: a parameter whose gradient comes after those of `params`.
            group: over which to average.
        """
        self._params = list(params)
        self.group = group
        numels = [param.numel() for param in params]
        self._buffer = torch.zeros(sum(numels), dtype=params[0].dtype, device=params[0].device)
        parts = self._buffer.split(numels)
        self._views = [part.view(param.shape) for part, param in zip(parts, params, strict=True)]
        self._work: Any = None
        trigger.register_hook(self._reduce)

    def broadcast(self, message_bytes: int) -> None:
        """Give the parameters the values of rank 0. Collective."""
        broadcast_coalesced(self.group, [param.detach() for param in self._params], message_bytes)

    def _reduce(self, grad: Tensor) -> Tensor:
        self._buffer.div_(self.group.size())
        self._work = dist.all_reduce(self._buffer, group=self.group, async_op=True)
        queue_backward_callback(self._wait)
        return grad

    def _wait(self) -> None:
        work, self._work = self._work, None
        if work is not None:
            work.wait()

    def attach(self) -> None:
        """Before backward: gradients that were dropped become zeros in the buffer.

        Autograd adds to what is there; if something replaces a gradient instead, that one leaves
        the buffer and is no longer averaged.
        """
        dropped = [param.grad is None for param in self._params]
        if all(dropped):
            self._buffer.zero_()
        for param, view, was_dropped in zip(self._params, self._views, dropped, strict=True):
            if was_dropped:
                param.grad = view if all(dropped) else view.zero_()

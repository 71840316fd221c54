"""A wrapper of one's own: data-parallel training with one all_reduce of all gradients together.

It is short and does without overlap: the gradients travel when the last of them is there. Every
parameter must get a gradient in each backward.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


class FlatDDP(nn.Module):
    """Trains copies of `module` on all ranks of a group as if they were one.

    process_group: the default group if None.
    broadcast_buffers: whether each forward begins with the buffers of the group's first rank.
    Raises RuntimeError if no parameter requires a gradient.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        process_group: dist.ProcessGroup | None = None,
        broadcast_buffers: bool = True,
    ) -> None:
        super().__init__()
        self.module = module
        self.process_group = process_group or dist.group.WORLD
        self.broadcast_buffers = broadcast_buffers
        self.require_backward_grad_sync = True
        self._trained = [p for p in module.parameters() if p.requires_grad]
        self._missing: set[Tensor] = set()  # no gradient yet in this iteration
        self._forward_copies_buffers = True
        if not self._trained:
            raise RuntimeError("FlatDDP needs a module with a parameter that requires a gradient")
        self._copy_from_first_rank([*module.parameters(), *module.buffers()])
        # Parameters hold their hooks for ever: one that held the wrapper would keep its group too.
        this = weakref.ref(self)
        for parameter in self._trained:
            parameter.register_post_accumulate_grad_hook(
                lambda parameter: (wrapper := this()) and wrapper._on_gradient(parameter)
            )

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """What the module returns."""
        if self._forward_copies_buffers and self.broadcast_buffers:
            self._copy_from_first_rank(list(self.module.buffers()))
        # As in torch: the first forward of an evaluation copies buffers, the others do not.
        self._forward_copies_buffers = torch.is_grad_enabled() and self.require_backward_grad_sync
        if self._forward_copies_buffers:
            if 0 < len(self._missing) < len(self._trained):
                raise RuntimeError(
                    "Expected to have finished reduction in the prior iteration before starting a "
                    f"new one. {len(self._missing)} parameters got no gradient."
                )
            self._missing = set(self._trained)
        return self.module(*inputs, **named)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, gradients accumulate on each rank, and are not averaged."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def _on_gradient(self, parameter: Tensor) -> None:
        """Called in backward, when a parameter's gradient is there."""
        if parameter in self._missing:
            self._missing.remove(parameter)
            if not self._missing:
                self._average()

    def _average(self) -> None:
        """One all_reduce for each dtype."""
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for parameter in self._trained:
            assert parameter.grad is not None
            by_dtype.setdefault(parameter.dtype, []).append(parameter.grad)
        with torch.no_grad():
            for grads in by_dtype.values():
                flat = torch.cat([grad.flatten() for grad in grads])
                flat /= dist.get_world_size(self.process_group)
                dist.all_reduce(flat, group=self.process_group)
                for grad, mean in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
                    grad.copy_(mean.view(grad.shape))

    @torch.no_grad()
    def _copy_from_first_rank(self, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            copy = tensor.contiguous()
            dist.broadcast(copy, group_src=0, group=self.process_group)
            tensor.copy_(copy)

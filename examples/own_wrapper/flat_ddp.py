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
        self._missing: set[Tensor] = set()  # in a backward: those without their gradient yet
        self._backward_averages = True
        self._forward_copies_buffers = True
        if not self._trained:
            raise RuntimeError(
                "FlatDDP is not needed when a module doesn't have any parameter that requires a "
                "gradient."
            )
        self._check_that_models_are_alike()
        self._copy_from_first_rank([*module.parameters(), *module.buffers()])
        # Parameters hold their hooks for ever: one that held the wrapper would keep its group too.
        this = weakref.ref(self)

        def on_gradient(parameter: Tensor) -> None:
            if wrapper := this():
                wrapper._on_gradient(parameter)

        for parameter in self._trained:
            parameter.register_post_accumulate_grad_hook(on_gradient)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """What the module returns."""
        if self._forward_copies_buffers and self.broadcast_buffers:
            self._copy_from_first_rank(list(self.module.buffers()))
        # As in torch: the first forward of an evaluation copies buffers, the others do not.
        self._forward_copies_buffers = torch.is_grad_enabled() and self.require_backward_grad_sync
        if torch.is_grad_enabled():
            if self._missing:
                raise RuntimeError(
                    "Expected to have finished reduction in the prior iteration before starting a "
                    f"new one. {len(self._missing)} parameters got no gradient."
                )
            self._backward_averages = self.require_backward_grad_sync
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
        if self._backward_averages:
            self._missing = self._missing or set(self._trained)
            self._missing.discard(parameter)
            if not self._missing:
                self._average()

    def _average(self) -> None:
        """One all_reduce for each dtype."""
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for parameter in self._trained:
            if parameter.grad is None:
                raise RuntimeError("FlatDDP: a gradient was taken away during backward")
            by_dtype.setdefault(parameter.dtype, []).append(parameter.grad)
        with torch.no_grad():
            for grads in by_dtype.values():
                flat = torch.cat([grad.flatten() for grad in grads])
                flat /= dist.get_world_size(self.process_group)
                dist.all_reduce(flat, group=self.process_group)
                for grad, mean in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
                    grad.copy_(mean.view(grad.shape))

    def _check_that_models_are_alike(self) -> None:
        """Otherwise ranks would wait for each other, or take values of another parameter."""
        mine = [(tuple(p.shape), str(p.dtype)) for p in self.module.parameters()]
        models: list[Any] = [None] * dist.get_world_size(self.process_group)
        dist.all_gather_object(models, mine, group=self.process_group)
        if any(model != models[0] for model in models):
            raise RuntimeError(f"FlatDDP: ranks have different parameters: {models}")

    @torch.no_grad()
    def _copy_from_first_rank(self, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            copy = tensor.contiguous()
            dist.broadcast(copy, group_src=0, group=self.process_group)
            tensor.data.copy_(copy)  # autograd may have saved the buffer, and need not notice

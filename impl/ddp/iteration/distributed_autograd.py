"""Distributed autograd (RPC): gradients of its context stand in for `.grad` during the reduction.

A backward pass over RPC leaves each parameter's gradient in the context that forward ran in. While
the reducer works on such a pass, the gradients are lent to `param.grad`, so that everything else
needs to know one place only; results are copied into them. Afterwards `.grad` is what it was.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from impl.ddp.iteration.grad_copy import GradientCopier
from impl.torch_private import distributed_autograd_context, distributed_autograd_gradients


class LentGradients:
    """What `.grad` was before a context's gradients were lent to it."""

    def __init__(self, copier: GradientCopier) -> None:
        self._copier = copier
        self._keeps_views = copier.gradient_as_bucket_view
        self._context_id: int | None = None
        self._own: dict[Tensor, Tensor | None] = {}

    def note_context(self) -> None:
        """Forward ran on this thread; so the context, if there is one, is this thread's."""
        self._context_id = distributed_autograd_context()

    def lend(self, params: Iterable[Tensor]) -> None:
        """Let `.grad` of `params` be the gradient that the context has for them, if it has one.

        Results must be copied into it, as a context cannot be given other tensors: for the time
        being, gradients are no views of buckets.
        """
        if self._context_id is None:
            return
        gradients = distributed_autograd_gradients(self._context_id)
        for param in params:
            if param in gradients and param not in self._own:
                self._copier.gradient_as_bucket_view = False
                self._own[param] = param.grad
                param.grad = gradients[param]

    def take_back(self) -> None:
        """Let `.grad` be what it was."""
        for param, own in self._own.items():
            param.grad = own
        if self._own:
            self._copier.gradient_as_bucket_view = self._keeps_views
        self._own.clear()

"""Autograd hooks on AccumulateGrad nodes, which report ready gradients to the reducer.

Every leaf that requires a gradient has an AccumulateGrad node, which adds what backward delivers
to `.grad`. A hook on that node runs afterwards: the gradient in `.grad` is then complete for this
graph.

Rejected: `Tensor.register_post_accumulate_grad_hook`. It is not called for a gradient that turns
out to be undefined, and such calls are how DDP learns that an output did not take part in the
loss.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor
from torch.autograd.graph import get_gradient_edge


class Listener(Protocol):
    """Who wants to know."""

    def gradient_accumulated(self, index: int, delivered: bool) -> None:
        """The hook of parameter `index` fired; `delivered` says whether there was a gradient."""

    def large_gradient_accumulated(self, index: int) -> None:
        """The hook of a large parameter fired, and will be counted next."""

    def gradients_arrived(self) -> None:
        """The number of fired hooks has reached `Arrivals.wake_at`."""


class Arrivals:
    """Parameters whose hooks have fired, in order, and the count at which to process them.

    Most hooks of a backward pass have no consequence: their bucket still misses others. Such a hook
    costs a third if it only leaves its index here, and the listener is woken when something can
    have become complete.
    """

    __slots__ = ("indices", "wake_at")

    def __init__(self) -> None:
        self.indices: list[int] = []  # always this list object, hooks hold it
        self.wake_at = 1

    def take(self) -> list[int]:
        """The indices that have not been looked at yet."""
        taken = self.indices.copy()
        # Not clear(): another thread may have added to the list since.
        del self.indices[: len(taken)]
        return taken


def accumulators_of(params: Sequence[Tensor]) -> list[Any]:
    """The AccumulateGrad node that each of `params` has now. Autograd holds them weakly."""
    return [get_gradient_edge(param).node for param in params]


class AccumulatorHooks:
    """A hook on the accumulator of every parameter, until removed or no longer referenced."""

    def __init__(
        self,
        params: Sequence[Tensor],
        are_large: Sequence[bool],
        listener: Listener,
        arrivals: Arrivals | None,
    ) -> None:
        """
        Args:
            params: leaves that require gradients.
            are_large: of which of them the listener wants to hear even if hooks are counted.
            listener: is held weakly, as parameters may outlive their DDP.
            arrivals: where hooks leave their index; None if the listener must hear of every hook,
                when it fires, and whether there was a gradient.

        Raises:
            RuntimeError: a parameter is listed twice.
        """
        # Held here because autograd itself holds accumulators weakly, and hooks die with them.
        self.accumulators = accumulators_of(params)
        self._first_param = params[0]
        self._handles: list[Any] = []
        seen: set[Any] = set()
        for index, node in enumerate(self.accumulators):
            if node in seen:
                raise RuntimeError(
                    f"Reducer tried to register duplicate grad accumulator for variable {index}"
                )
            seen.add(node)
        listener_ref = weakref.ref(listener)
        for index, node in enumerate(self.accumulators):
            if arrivals is None:
                hook = _reporting_hook(index, listener_ref)
            elif are_large[index]:
                hook = _copying_hook(index, arrivals, listener_ref)
            else:
                hook = _counting_hook(index, arrivals, listener_ref)
            self._handles.append(node.register_hook(hook))
        weakref.finalize(self, _remove, self._handles).atexit = False

    def are_stale(self) -> bool:
        """Whether autograd has replaced the accumulators, so that the hooks never fire again.

        It does so if a parameter's data changes its dtype or device, also if only for a moment
        (`model.cpu().cuda()`). One parameter is asked, as a conversion concerns all of them; if
        only some are converted, their gradients go missing, and that is an error of its own.
        """
        if not self._first_param.requires_grad:
            return False
        return get_gradient_edge(self._first_param).node is not self.accumulators[0]

    def remove(self) -> None:
        """Let the parameters go. May be called again."""
        _remove(self._handles)


def _reporting_hook(index: int, listener_ref: weakref.ref[Listener]) -> Callable[[Any, Any], None]:
    def on_accumulated(_grad_inputs: Any, grads: Any) -> None:
        listener = listener_ref()
        if listener is not None:
            listener.gradient_accumulated(index, grads[0] is not None)

    return on_accumulated


def _counting_hook(
    index: int, arrivals: Arrivals, listener_ref: weakref.ref[Listener]
) -> Callable[[Any, Any], None]:
    indices = arrivals.indices

    def on_accumulated(_grad_inputs: Any, _grads: Any) -> None:
        indices.append(index)
        if len(indices) >= arrivals.wake_at:
            listener = listener_ref()
            if listener is not None:
                listener.gradients_arrived()

    return on_accumulated


def _copying_hook(
    index: int, arrivals: Arrivals, listener_ref: weakref.ref[Listener]
) -> Callable[[Any, Any], None]:
    indices = arrivals.indices

    def on_accumulated(_grad_inputs: Any, _grads: Any) -> None:
        listener = listener_ref()
        if listener is not None:
            listener.large_gradient_accumulated(index)
            indices.append(index)
            if len(indices) >= arrivals.wake_at:
                listener.gradients_arrived()

    return on_accumulated


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()

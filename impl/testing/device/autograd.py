"""Autograd over several devices, as torch's engine runs it: a thread for each, with its streams.

CPU tensors have one autograd thread, on which the nodes of all devices run in one order. Here each
node finds the streams that it would have on the thread of its own device: that of its forward on
this device, and the default streams of the others, whatever the forward's are there. Which order
the nodes of two devices come in is decided by the forward: later ones come first.

Hooks of nodes find these streams; hooks of tensors, which autograd calls before, find those of the
node before. The threads' Python does not run at the same time. Code that holds a lock while it
handles a gradient, as a reducer does, cannot tell the difference.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from impl.testing.device.simulated import CurrentStreams, SimulatedDevice
from impl.torch_private import queue_backward_callback


def backward(device: SimulatedDevice, loss: Tensor) -> None:
    """`loss.backward()`, of a forward that ran on the streams that are the current ones now."""
    caller = device.current

    def enter(grads: Any) -> None:
        index = next((device.index_of(grad) for grad in grads if grad is not None), None)
        if index is not None:
            stream = caller.streams.get(index) or device.default_stream(index)
            device.change_stream(stream)

    def begin(_: Any) -> None:
        # before those of the program; the engine gives the caller's streams to them all
        queue_backward_callback(lambda: _return_to(device, caller))

    assert loss.grad_fn is not None
    handles: list[Any] = [loss.grad_fn.register_prehook(begin)]
    handles += [node.register_prehook(enter) for node in _nodes(loss.grad_fn)]
    try:
        loss.backward()
    finally:
        _return_to(device, caller)
        for handle in handles:
            handle.remove()


def _return_to(device: SimulatedDevice, caller: CurrentStreams) -> None:
    device.current = caller


def _nodes(root: Any) -> Iterator[Any]:
    """All nodes of a graph."""
    seen = {root}
    frontier = [root]
    while frontier:
        node = frontier.pop()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                frontier.append(following)


def moved(x: Tensor, device: SimulatedDevice, index: int) -> Tensor:
    """A copy on another device, `x.to(...)`, whose gradient goes back to where `x` is."""
    if device.index_of(x) == index:
        return x
    y: Tensor = _Moved.apply(x, device, index)  # type: ignore[no-untyped-call]
    return y


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, device: SimulatedDevice, index: int) -> Tensor:
        ctx.device, ctx.home = device, device.index_of(x)
        ctx.stream = device.current_stream(ctx.home)
        return _copy(x, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Runs on the thread of `grad`'s device, on which the other's stream is the default one.

        The node that gets the result runs on another stream there, which the engine has wait.
        """
        back = _copy(grad, ctx.home)
        done = ctx.device.new_event()
        done.record_here(ctx.home)
        done.order(ctx.stream)
        ctx.device.tell_allocator(back, ctx.stream)
        return back, None, None


def _copy(x: Tensor, index: int | None) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=torch.device("cpu", index or 0)).copy_(x)

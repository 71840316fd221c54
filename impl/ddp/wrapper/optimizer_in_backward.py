"""Steps optimizers as soon as a bucket's gradients are averaged, during backward.

For parameters that `torch.distributed.optim._apply_optimizer_in_backward` gave an optimizer each.
Their gradients are gone after the step, and `.grad` is None. Those of other parameters are handed
out at the end of backward as always (torch 2.13 leaves each rank its own, unless they are views of
buckets).

torch 2.13 has this for accelerators only; here the host works too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from impl.ddp.buckets.bucket import GradBucket
from impl.ddp.iteration.reducer import Reducer
from impl.ddp.parameters import has_optimizer
from impl.device import handle_of
from impl.torch_private import (
    is_backward_running,
    optimizer_hook_handles,
    queue_backward_callback,
)


def take_over(params: Iterable[Tensor]) -> None:
    """Remove the hooks that would step on gradients before these are averaged."""
    for param in params:
        for handle in optimizer_hook_handles(param):
            handle.remove()


class OptimizerInBackward:
    """The communication hook that averages, then steps."""

    def __init__(self, reducer: Reducer, params: Sequence[Tensor]) -> None:
        """
        Args:
            reducer: whose buckets they are.
            params: all parameters that DDP looks after.
        """
        self._reducer = reducer
        self._params = params
        devices = {handle_of(param) for param in reducer.params}
        self._streams = {device: device.new_stream() for device in devices}

    def hook(self) -> Any:
        """The hook, under the name that torch's logging data give it."""

        def apply_optim_in_backward_hook(_state: Any, bucket: GradBucket) -> Any:
            return self._average_and_step(bucket)

        apply_optim_in_backward_hook.__qualname__ = (
            "_apply_optim_in_backward_hook.<locals>.apply_optim_in_backward_hook"
        )
        return apply_optim_in_backward_hook

    def _average_and_step(self, bucket: GradBucket) -> Any:
        device = handle_of(bucket.parameters()[0])
        future = self._reducer._run_allreduce_hook(bucket)
        with device.use_stream(self._streams[device]):
            future.wait()
            bucket.buffer().div_(self._reducer.process_group.size())
            for param, grad in zip(bucket.parameters(), bucket.gradients(), strict=True):
                if has_optimizer(param):
                    self._step(param, grad)
            # the reducer, which waits for each bucket, thereby comes after this stream
            done = device.new_future()
            done.set_result(bucket.buffer())
        if is_backward_running():
            queue_backward_callback(self._drop_gradients)
        else:  # a rank that has joined takes the steps of the others
            self._drop_gradients()
        return done

    def _step(self, param: Any, grad: Tensor) -> None:
        param.grad = grad
        for optimizer in param._in_backward_optimizers:
            optimizer.step()

    def _drop_gradients(self) -> None:
        for param in self._params:
            if has_optimizer(param):
                param.grad = None

"""DDP's `mixed_precision`: low-precision parameters, cast buffers, and reduction in `reduce_dtype`.

What lives where, for a parameter of a floating dtype:

                      param.data          param.grad
    between steps     full precision      full precision
    forward           low precision       low precision, if gradients accumulate
    backward          low precision       low precision, as autograd delivers it
    after backward    full precision      full precision, the reduced values

The low precision copy has its storage only while it is needed. What is written to a parameter
counts, whichever of the two it holds at that time. Changing a parameter's dtype gives it a new
AccumulateGrad node, on which the reducer's own hooks would not fire; new ones are installed on all
parameters with each forward pass.

torch 2.13 has this for accelerators only; here the host works too.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from impl.ddp.buckets.bucket import GradBucket
from impl.ddp.iteration.comm_hooks import all_reduce
from impl.ddp.iteration.reducer import Reducer
from impl.device import handle_of
from impl.torch_private import allocate_storage, free_storage


class MixedPrecisionConfig(Protocol):
    """As torch's `_MixedPrecision`; None leaves a dtype as it is."""

    param_dtype: torch.dtype | None  # of parameters and inputs, in forward and backward
    reduce_dtype: torch.dtype | None  # of gradients on their way
    buffer_dtype: torch.dtype | None


@dataclass
class _Precisions:
    """The two forms of one parameter; torch's names for them are set on the parameter, too."""

    param: Any
    full: Tensor
    low: Tensor
    is_low: bool = False
    version: int = 0  # of the parameter when it became low

    @classmethod
    def of(cls, param: Tensor, dtype: torch.dtype) -> _Precisions:
        low = torch.zeros_like(param, dtype=dtype, requires_grad=param.requires_grad)
        free_storage(low)
        precisions = cls(param, param.data, low)
        precisions._name()
        return precisions

    def lower(self) -> None:
        param, low = self.param, self.low
        self._take_in()
        allocate_storage(low, param.shape)
        low.copy_(self.full)
        param.data = low
        self.is_low, self.version = True, param._version
        self._name()

    def lower_gradient(self) -> None:
        """Autograd adds to the gradient that is there, and does not mix dtypes."""
        if self.param.grad is not None:
            self.param.grad.data = self.param.grad.to(self.low.dtype)

    def restore(self) -> None:
        param = self.param
        self._take_in()
        param.data = self.full
        free_storage(self.low)
        if param.grad is not None:
            param.grad.data = param.grad.to(param.dtype)
        self.is_low = False
        self._name()

    def value(self) -> Tensor:
        """In full precision."""
        self._take_in()
        return self.full

    def _take_in(self) -> None:
        """Take in what the program wrote to the parameter, or put in place of its data."""
        data = self.param.data
        if not self.is_low or data.data_ptr() != self.low.data_ptr():
            self.full = data.to(self.full.dtype) if self.is_low else data
        elif self.param._version != self.version:
            self.full.copy_(self.low)

    def _name(self) -> None:
        # a freed storage could be saved with the parameter, but not loaded
        nothing = torch.empty(0, dtype=self.low.dtype, device=self.low.device)
        self.param._mp_param = self.low if self.is_low else nothing
        self.param._fp_param = self.full


class MixedPrecision:
    """Switches a module between its precisions."""

    def __init__(
        self,
        config: MixedPrecisionConfig,
        module: nn.Module,
        reducer: Reducer,
        ignored: Collection[str],
    ) -> None:
        """
        Args:
            config: the dtypes.
            module: the user's module; its floating buffers are cast here, once and for all.
            reducer: of its gradients.
            ignored: names of parameters and buffers that keep their dtype.
        """
        self._config = config
        self._module = module
        self._reducer = reducer
        self._index_of = {param: index for index, param in enumerate(reducer.params)}
        self._device = handle_of(reducer.params[0])
        self._copy_stream = self._device.new_stream()
        self._copied: dict[nn.Module, Any] = {}  # events, on accelerators
        self._hooks: dict[int, Any] = {}  # by index of the parameter
        self._is_low = False
        # whether no forward pass waited for its backward when the latest one began
        self._began_high = False
        self._params: dict[Tensor, _Precisions] = {}
        self._cast_buffers(ignored)
        if config.param_dtype is not None:
            for name, param in module.named_parameters():
                if param.is_floating_point() and name not in ignored:
                    self._params[param] = _Precisions.of(param, config.param_dtype)
            reducer._set_mixed_precision_param_dtype(config.param_dtype)
            reducer.before_delivery = self.restore
            if self._device.has_streams:
                for submodule in module.modules():
                    submodule.register_forward_pre_hook(self._wait_for_copies)

    def _cast_buffers(self, ignored: Collection[str]) -> None:
        if self._config.buffer_dtype is None:
            return
        for name, buffer in self._module.named_buffers():
            if buffer.is_floating_point() and name not in ignored:
                buffer.data = buffer.to(self._config.buffer_dtype)

    def lower(self) -> None:
        """Before forward: give every parameter its low precision data."""
        if self._config.param_dtype is None:
            return
        self._began_high, self._is_low = not self._is_low, True
        with torch.no_grad():
            for precisions in self._params.values():
                precisions.lower_gradient()
            self._copy_params()
        if torch.is_grad_enabled():
            self._hook_params()

    def _copy_params(self) -> None:
        # The copies read what the optimizer wrote on the current stream, and take memory that the
        # last backward pass read there. Those of parameters on other devices than the first one's
        # stay on the current streams there, and need no event.
        before = self._device.record_event()
        with self._device.use_stream(self._copy_stream):
            self._copy_stream.wait_event(before)
            for submodule in self._module.modules():
                for param in submodule.parameters(recurse=False):
                    if param in self._params:
                        self._params[param].lower()
                self._copied[submodule] = self._device.record_event()

    def _wait_for_copies(self, submodule: nn.Module, _inputs: Any) -> None:
        event = self._copied.pop(submodule, None)
        if event is not None:
            self._device.current_stream().wait_event(event)

    def _hook_params(self) -> None:
        """Tell the reducer about gradients; most accumulators are new."""
        for param, index in self._index_of.items():
            if index in self._hooks:
                continue
            node = get_gradient_edge(param).node
            handle = node.register_hook(self._hook_for(index))
            self._hooks[index] = (node, handle)  # the node dies unless it is held

    def _hook_for(self, index: int) -> Any:
        reducer = self._reducer

        def on_accumulated(_grad_inputs: Any, grads: Any) -> None:
            reducer.gradient_accumulated(index, grads[0] is not None)

        return on_accumulated

    def restore(self) -> None:
        """Give every parameter its full precision data, and its gradient the same dtype."""
        if not self._is_low:
            return
        self._is_low = False
        for _, handle in self._hooks.values():
            handle.remove()
        self._hooks.clear()
        self._copied.clear()
        with torch.no_grad():
            for precisions in self._params.values():
                if precisions.is_low:
                    precisions.restore()

    def values_of_low(self) -> dict[str, Tensor]:
        """In full precision, by name, the values of the parameters that are low now."""
        values = {}
        with torch.no_grad():
            for name, param in self._module.named_parameters():
                if param in self._params and self._params[param].is_low:
                    values[name] = self._params[param].value()
        return values

    def no_backward_follows(self) -> None:
        """Forward has failed, or has run without gradients; an earlier one may wait for its own."""
        if self._began_high:
            self.restore()

    def reduce_hook(self, _state: Any, bucket: GradBucket) -> Any:
        """Communication hook: the average, in `reduce_dtype`.

        Divides first, as the reducer does without a hook: sums in half precision overflow early.
        Complex gradients keep their precision, as complex parameters do.
        """
        buffer = bucket.buffer()
        if self._config.reduce_dtype is not None and not bucket.parameters()[0].is_complex():
            buffer = buffer.to(self._config.reduce_dtype)
        group = self._reducer.process_group
        future = all_reduce(group, buffer.div_(group.size())).get_future()

        def take_tensor(done: Any) -> Tensor:
            tensor: Tensor = done.value()[0]
            return tensor

        return future.then(take_tensor)


def reduce_in_low_precision(precision: MixedPrecision) -> Any:
    """`precision.reduce_hook` under the name that torch's logging data give it."""

    def _reducer_allreduce_and_upcast_hook(state: Any, bucket: GradBucket) -> Any:
        return precision.reduce_hook(state, bucket)

    _reducer_allreduce_and_upcast_hook.__qualname__ = _reducer_allreduce_and_upcast_hook.__name__
    return _reducer_allreduce_and_upcast_hook

"""Sets module attributes to views of the flat parameter, unsharded or sharded, and their gradients.

A module attribute such as `linear.weight` is one of three things, depending on the phase:

| attribute is        | when                                                  |
|---------------------|-------------------------------------------------------|
| a plain tensor      | forward and backward (autograd must see the view);    |
|                     | always with `use_orig_params=False`                   |
| an unsharded param  | `summon_full_params`, state dicts, `NO_SHARD`         |
| a sharded parameter | otherwise with `use_orig_params=True` (the optimizer  |
|                     | works on it)                                          |

`AttributeViews` sets them. `OrigParamViews` adds what only `use_orig_params=True` needs: the
parameter variables, which must stay the same objects for the optimizer, and their gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from impl.fsdp.flat_param.layout import ShardLayout
from impl.fsdp.flat_param.packing import CollectedParams, FlatMetadata


def _uses_plain_attributes(module: nn.Module) -> bool:
    cls = type(module)
    return cls.__setattr__ is nn.Module.__setattr__ and cls.__delattr__ is nn.Module.__delattr__


def set_tensor(module: nn.Module, name: str, tensor: Tensor, *, past_setattr: bool) -> None:
    """Make `module.name` a plain tensor that `module.parameters()` does not yield.

    Args:
        past_setattr: do not call what the module's class defines as `__setattr__`.
    """
    if past_setattr or _uses_plain_attributes(module):
        # What `delattr` and `setattr` come to, at a fifth of their time; this runs for every
        # parameter in every iteration.
        module._parameters.pop(name, None)
        module.__dict__[name] = tensor
        return
    if hasattr(module, name):
        delattr(module, name)
    setattr(module, name, tensor)


def set_param(module: nn.Module, name: str, param: nn.Parameter, *, past_setattr: bool) -> None:
    """Make `module.name` a registered parameter."""
    if past_setattr or _uses_plain_attributes(module):
        module.__dict__.pop(name, None)
        module._parameters[name] = param
        return
    if hasattr(module, name):
        delattr(module, name)
    setattr(module, name, param)


def delete(module: nn.Module, name: str) -> None:
    if hasattr(module, name):
        delattr(module, name)


class AttributeViews:
    """Sets the attributes of the modules whose parameters a flat parameter holds.

    Args:
        past_setattr: as `FSDP_USE_UNSAFE_SETATTR=1` asks for, past a `__setattr__` of their own.
    """

    def __init__(self, metadata: FlatMetadata, *, past_setattr: bool = False) -> None:
        self.metadata = metadata
        self._set_tensor = functools.partial(set_tensor, past_setattr=past_setattr)
        self._set_param = functools.partial(set_param, past_setattr=past_setattr)

    def show_tensors(self, flat: Tensor) -> None:
        """Show views into the unsharded `flat` (layout.numel,) as plain tensors."""
        views = self.metadata.unflatten(flat)
        for view, info in zip(views, self.metadata.params, strict=True):
            self._set_tensor(info.module, info.name, view)
        for shared in self.metadata.shared:
            self._set_tensor(shared.module, shared.name, views[shared.primary])

    def show_fresh_params(self, flat: Tensor, *, requires_grad: bool) -> None:
        """Show views into the unsharded `flat` as new parameters, tied where the user tied them."""
        params = [
            nn.Parameter(view, requires_grad=requires_grad)
            for view in self.metadata.unflatten(flat)
        ]
        for param, info in zip(params, self.metadata.params, strict=True):
            self._set_param(info.module, info.name, param)
        for shared in self.metadata.shared:
            self._set_param(shared.module, shared.name, params[shared.primary])

    def hide(self) -> None:
        """Remove the attributes."""
        for info in self.metadata.params:
            delete(info.module, info.name)
        for shared in self.metadata.shared:
            delete(shared.module, shared.name)


class OrigParamViews(AttributeViews):
    """The same with `use_orig_params=True`: the parameter objects persist.

    Attributes:
        params: the original parameter variables, one for each of `metadata.params`.
        shared_params: the variables of tied parameters, one for each of `metadata.shared`.
        grad_is_none: for each parameter, whether its gradient is None for the user although the
            flat gradient exists and holds zeros in its place.
    """

    def __init__(self, collected: CollectedParams, *, past_setattr: bool = False) -> None:
        super().__init__(collected.metadata, past_setattr=past_setattr)
        self.params = [_as_parameter(tensor) for tensor in collected.tensors]
        self.shared_params = [_as_parameter(tensor) for tensor in collected.shared_tensors]
        self.grad_is_none = [False] * len(self.params)
        # The tensors that the last forward showed. The backward pass shows the same objects with
        # fresh data, so that what reentrant checkpointing recomputes reaches the same gradient
        # accumulator; otherwise the post-backward hook would not fire.
        self.forward_tensors: list[Tensor | None] = [None] * len(self.params)

    def show_forward_tensors(self, flat: Tensor) -> None:
        """Show plain tensors for a forward, which `parameters()` yields nevertheless."""
        views = self.metadata.unflatten(flat)
        self.forward_tensors = list(views)
        self._show_registered(views)

    def show_backward_tensors(self, flat: Tensor) -> None:
        """Show the tensors of the forward again, with the data of the unsharded `flat`.

        Only the first backward after a forward needs the same objects, for their post-backward
        hooks. Those have fired by the time of a second one, which gets new tensors.
        """
        shown: list[Tensor] = []
        for view, tensor in zip(self.metadata.unflatten(flat), self.forward_tensors, strict=True):
            if tensor is None:
                shown.append(view)
                continue
            tensor.data = view
            shown.append(tensor)
        for tensor, info in zip(shown, self.metadata.params, strict=True):
            self._set_tensor(info.module, info.name, tensor)
        for shared in self.metadata.shared:
            self._set_tensor(shared.module, shared.name, shown[shared.primary])

    def _show_registered(self, tensors: Sequence[Tensor]) -> None:
        for tensor, info in zip(tensors, self.metadata.params, strict=True):
            self._set_tensor(info.module, info.name, tensor)
            # Code that iterates over `parameters()` inside a forward must find them.
            info.module._parameters[info.name] = tensor  # type: ignore[assignment]  # no Parameter
        for shared in self.metadata.shared:
            tensor = tensors[shared.primary]
            self._set_tensor(shared.module, shared.name, tensor)
            shared.module._parameters[shared.name] = tensor  # type: ignore[assignment]  # as above

    def show_unsharded_params(self, flat: Tensor, *, requires_grad: bool) -> None:
        """Show the parameter variables, with views into the unsharded `flat` as their data."""
        for index, view in enumerate(self.metadata.unflatten(flat)):
            info = self.metadata.params[index]
            if type(view) is DTensor:
                # `param.data = view` cannot make a plain parameter a DTensor: the variable changes.
                self._set_param(
                    info.module, info.name, nn.Parameter(view, requires_grad=requires_grad)
                )
                continue
            param = self.params[index]
            param.data = view
            self._set_param(info.module, info.name, param)
        self._show_shared_params()

    def show_sharded_params(self, shard: Tensor, layout: ShardLayout) -> None:
        """Show the parameter variables, with their parts of `shard` (layout.numel,) as data.

        The parts are one-dimensional. A parameter with nothing in this shard has no elements; its
        variable stays, so that the module prints and the optimizer's groups are the same on every
        rank.
        """
        empty = torch.empty(0, dtype=shard.dtype, device=shard.device)
        for param, part, info in zip(self.params, layout.params, self.metadata.params, strict=True):
            param.data = (
                empty
                if part is None
                else shard[part.offset_in_shard : part.offset_in_shard + part.numel]
            )
            self._set_param(info.module, info.name, param)
        self._show_shared_params()

    def _show_shared_params(self) -> None:
        for param, shared in zip(self.shared_params, self.metadata.shared, strict=True):
            primary = self.metadata.params[shared.primary]
            param.data = getattr(primary.module, primary.name)
            self._set_param(shared.module, shared.name, param)

    def forget_forward_tensors(self) -> None:
        self.forward_tensors = [None] * len(self.params)

    # Gradients

    def all_params(self) -> list[nn.Parameter]:
        return [*self.params, *self.shared_params]

    def clear_grads(self) -> None:
        for param in self.all_params():
            param.grad = None

    def show_unsharded_grads(self, flat_grad: Tensor) -> None:
        """Give the parameters views into the unsharded `flat_grad` (layout.numel,) as gradients."""
        shown: list[Tensor] = []
        for view, info in zip(
            self.metadata.unflatten(flat_grad), self.metadata.params, strict=True
        ):
            _set_grad(getattr(info.module, info.name), view)
            shown.append(view)
        for shared in self.metadata.shared:
            _set_grad(getattr(shared.module, shared.name), shown[shared.primary])

    def show_sharded_grads(self, grad: Tensor, layout: ShardLayout) -> None:
        """Give each parameter its part of the sharded gradient `grad` (layout.numel,).

        Parameters that are frozen, have nothing in this shard or whose gradient is logically None
        get None. The gradient may have another dtype than the parameter.
        """
        parts = [
            None if part is None else grad[part.offset_in_shard : part.offset_in_shard + part.numel]
            for part in layout.params
        ]
        self._show_param_grads(parts)

    def show_whole_grads(self, grad: Tensor) -> None:
        """The same for a flat gradient (layout.numel,) that is not sharded (`NO_SHARD`)."""
        self._show_param_grads(self.metadata.unflatten(grad))

    def _show_param_grads(self, grads: Sequence[Tensor | None]) -> None:
        for param, grad, is_none in zip(self.params, grads, self.grad_is_none, strict=True):
            if grad is None or is_none or not param.requires_grad:
                param.grad = None
            else:
                _set_grad(param, grad)
        for param, shared in zip(self.shared_params, self.metadata.shared, strict=True):
            primary = self.metadata.params[shared.primary]
            # The same tensor, not a copy: the tie goes on.
            param.grad = getattr(primary.module, primary.name).grad if param.requires_grad else None

    def mark_grads_computed(self) -> None:
        """After a backward, every parameter that requires a gradient has one, if only zeros."""
        for index, param in enumerate(self.params):
            if param.requires_grad:
                self.grad_is_none[index] = False


def _as_parameter(tensor: Tensor) -> nn.Parameter:
    return tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor)


def _set_grad(param: Tensor, grad: Tensor) -> None:
    """Give `param` the gradient `grad`, also if it differs in shape, dtype or device.

    torch checks assignments to `.grad`, but not to the data of an existing gradient. Inside
    `no_sync()` a sharded parameter carries an unsharded gradient this way, and with low precision
    gradients a float32 parameter a bfloat16 one.
    """
    if param.shape == grad.shape and param.dtype == grad.dtype and param.device == grad.device:
        param.grad = grad
        return
    if param.grad is None:
        param.grad = torch.empty_like(param)
    param.grad.data = grad

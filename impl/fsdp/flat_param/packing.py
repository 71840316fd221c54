"""Flattening and unflattening of parameters, and metadata of original and shared parameters.

`describe_params` walks the module once, when the unit is built, and notes every place that holds a
parameter. What it returns never changes afterwards: `flatten` and `unflatten` are the two
directions, used for parameters, gradients and optimizer state alike.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FlatParameter

from impl.fsdp.common import named_parameters_with_duplicates
from impl.fsdp.flat_param.layout import FlatLayout, plan_layout

# What torch writes between parameters, so that both give the same local state. Never computed with.
ALIGNMENT_PADDING_VALUE = 42


@dataclass(frozen=True)
class OrigParam:
    """An original parameter: the first place that holds it, and its geometry.

    `stride` is None for a parameter that is contiguous in the usual order; otherwise the parameter
    is laid out in memory order (channels-last, transposed) and viewed with that stride.
    """

    name: str
    module: nn.Module
    module_name: str
    shape: torch.Size
    stride: tuple[int, ...] | None
    extension: Any = None

    @property
    def fqn(self) -> str:
        """Fully qualified name, seen from the unit's module."""
        return f"{self.module_name}.{self.name}" if self.module_name else self.name


@dataclass(frozen=True)
class SharedParam:
    """A further place that holds the original parameter with index `primary` (tied weights)."""

    name: str
    module: nn.Module
    module_name: str
    primary: int


class ParamTransform:
    """Turns parameters into plain tensors before flattening and back (none needed: identity).

    Tensor parallelism brings its own, for parameters that are `DTensor`s.
    """

    def pre_flatten(self, tensor: Tensor) -> tuple[Tensor, Any]:
        return tensor, None

    def post_unflatten(self, tensor: Tensor, extension: Any) -> Tensor:
        return tensor


@dataclass(frozen=True)
class FlatMetadata:
    """Everything about a flat parameter's contents that does not change after construction."""

    params: tuple[OrigParam, ...]
    shared: tuple[SharedParam, ...]
    layout: FlatLayout
    transform: ParamTransform

    @property
    def fqns(self) -> tuple[str, ...]:
        return tuple(param.fqn for param in self.params)

    def unflatten(self, flat: Tensor) -> list[Tensor]:
        """Views into `flat`, (layout.numel,), with the shapes of the original parameters.

        Autograd sees one split: the gradient of `flat` is the concatenation of the gradients of the
        views, with zeros for padding and for views that were not used.
        """
        pieces = torch.split(flat, self.layout.split_numels)
        views = []
        params = iter(self.params)
        for piece, segment in zip(pieces, self.layout.segments, strict=True):
            if segment.is_padding:
                continue
            param = next(params)
            if param.stride is not None:
                view = piece.as_strided(param.shape, param.stride)
            elif len(param.shape) == 1:
                view = piece  # has that shape: one node of autograd less
            else:
                view = piece.view(param.shape)
            views.append(self.transform.post_unflatten(view, param.extension))
        return views

    def flatten_one(self, index: int, tensor: Tensor) -> Tensor:
        """`tensor`, of the shape of original parameter `index`, in the order of the flat one.

        Unlike `tensor.flatten()` this is right for channels-last parameters too. (torch 2.13 loads
        their optimizer state in the wrong order.)
        """
        stride = self.params[index].stride
        if stride is None:
            return tensor.reshape(-1)
        ordered = torch.empty_strided(
            tensor.shape, stride, dtype=tensor.dtype, device=tensor.device
        )
        return ordered.copy_(tensor).as_strided((tensor.numel(),), (1,))

    def flatten(self, tensors: Sequence[Tensor]) -> Tensor:
        """Copy `tensors`, one for each original parameter, into a new tensor (layout.numel,)."""
        first = tensors[0]
        pieces: list[Tensor] = []
        remaining = iter(enumerate(tensors))
        for segment in self.layout.segments:
            if segment.is_padding:
                pieces.append(first.new_full((segment.numel,), ALIGNMENT_PADDING_VALUE))
            else:
                index, tensor = next(remaining)
                pieces.append(self.flatten_one(index, tensor.detach()))
        return torch.cat(pieces)


@dataclass(frozen=True)
class CollectedParams:
    """The parameters found in a module, before they are flattened.

    `tensors` parallels `metadata.params`, `shared_tensors` parallels `metadata.shared`.
    """

    metadata: FlatMetadata
    tensors: tuple[Tensor, ...]
    shared_tensors: tuple[Tensor, ...]


def describe_params(
    module: nn.Module,
    managed: Collection[nn.Parameter],
    *,
    alignment: int,
    world_size: int,
    transform: ParamTransform,
) -> CollectedParams:
    """Note where `module` holds the parameters in `managed`, in the order of `named_modules`.

    Raises:
        ValueError: if `module` holds none of them.
    """
    wanted = {id(param) for param in managed}
    index_of: dict[int, int] = {}
    params: list[OrigParam] = []
    shared: list[SharedParam] = []
    tensors: list[Tensor] = []
    shared_tensors: list[Tensor] = []
    for module_name, submodule in module.named_modules(remove_duplicate=False):
        for name, param in named_parameters_with_duplicates(submodule, recurse=False):
            if id(param) not in wanted:
                continue
            if id(param) in index_of:
                shared.append(SharedParam(name, submodule, module_name, index_of[id(param)]))
                shared_tensors.append(param)
                continue
            index_of[id(param)] = len(params)
            tensor, extension = transform.pre_flatten(param)
            params.append(
                OrigParam(
                    name=name,
                    module=submodule,
                    module_name=module_name,
                    shape=tensor.shape,
                    stride=_flat_stride(tensor),
                    extension=extension,
                )
            )
            tensors.append(tensor)
    if not params:
        raise ValueError(
            f"`params` were not found in `module`'s tree\nparams: {list(managed)}\nmodule: {module}"
        )
    layout = plan_layout(
        [tensor.numel() for tensor in tensors], alignment=alignment, world_size=world_size
    )
    return CollectedParams(
        FlatMetadata(tuple(params), tuple(shared), layout, transform),
        tuple(tensors),
        tuple(shared_tensors),
    )


def validate_params(params: Sequence[Tensor], *, use_orig_params: bool) -> None:
    """Check that `params` can live in one flat parameter.

    Raises:
        ValueError: for a flat parameter among them, integers, or mixed dtypes or devices; for mixed
            `requires_grad` unless `use_orig_params`.
    """
    if not params:
        raise ValueError("Expects non-empty `params`")
    first = params[0]
    for param in params:
        if isinstance(param, FlatParameter):
            raise ValueError("Cannot flatten a `FlatParameter`")
        if not param.is_floating_point():
            raise ValueError("Cannot flatten integer dtype tensors")
        if param.dtype != first.dtype:
            raise ValueError(
                f"Must flatten tensors with uniform dtype but got {first.dtype} and {param.dtype}"
            )
        if not use_orig_params and param.requires_grad != first.requires_grad:
            raise ValueError(
                "Must flatten tensors with uniform `requires_grad` when `use_orig_params=False`"
            )
        if param.device != first.device:
            raise ValueError(
                "Must flatten tensors on the same device but got both "
                f"{first.device} and {param.device}"
            )


def make_flat_parameter(data: Tensor, *, requires_grad: bool) -> nn.Parameter:
    """A parameter that `isinstance(..., torch.distributed.fsdp.FlatParameter)` accepts."""
    return FlatParameter(data, requires_grad=requires_grad)


def _flat_stride(tensor: Tensor) -> tuple[int, ...] | None:
    """The stride with which a flattened `tensor` is viewed, None if a plain `view` will do.

    A tensor with gaps or overlaps (a slice with a step, an expanded one) has no memory order of its
    own to keep; it is laid out contiguously. (torch 2.13 takes what lies in the gaps instead: an
    error for the last parameter, wrong values for any other.)
    """
    # A 1x1 channels-last convolution weight counts as contiguous both ways, but cuDNN then refuses
    # its fast kernels: keep the stride unless the last dimension really is the innermost one.
    if tensor.is_contiguous() and tensor.stride(-1) == 1:
        return None
    return tuple(tensor.stride()) if _is_dense(tensor) else None


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements of `tensor` fill a run of memory without gaps or overlaps."""
    expected = 1
    dims = sorted(zip(tensor.stride(), tensor.shape, strict=True))
    for stride, size in dims:
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True

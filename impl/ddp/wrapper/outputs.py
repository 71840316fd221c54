"""Tensors in forward's output: finds them, and hooks them to tell the reducer that backward begins.

Forward's result is a freeform object. The tensors in it are needed for two things: to search the
graph behind them, and to notice when a backward pass comes through:

    notify_at       a hook on the nodes that produced the outputs. Costs next to nothing.
    pass_through    an autograd function that all outputs run through. If the loss leaves one of
                    them out, its parameters are then still visited, with an undefined gradient, and
                    the reducer need not wait for them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from impl.torch_private import local_value_of_rref, pytree_flatten, pytree_unflatten

Notify = Callable[[], None]


def find_tensors(output: Any) -> Iterator[Tensor]:
    """All tensors in `output`: in lists, tuples, mappings, dataclasses, registered pytrees."""
    if isinstance(output, Tensor):
        yield output
        return
    leaves, _ = pytree_flatten(output)
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            yield leaf
        elif isinstance(leaf, (list, tuple)):  # subclasses that pytree does not know
            for item in leaf:
                yield from find_tensors(item)
        elif isinstance(leaf, dict):
            for item in leaf.values():
                yield from find_tensors(item)
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            for field in dataclasses.fields(leaf):
                yield from find_tensors(getattr(leaf, field.name))
        else:
            is_rref, value = local_value_of_rref(leaf)
            if is_rref:
                yield from find_tensors(value)


def notify_at(outputs: Sequence[Tensor], notify: Notify) -> None:
    """Call `notify` whenever a backward pass reaches one of `outputs`."""
    for node in {output.grad_fn for output in outputs}:
        if node is not None:
            node.register_prehook(lambda _grads: notify())


class _PassThrough(torch.autograd.Function):
    """Identity on all outputs at once, so that none of them is left out of the graph."""

    @staticmethod
    def forward(ctx: Any, clone: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)  # an output that the loss left out stays undefined
        # An output that is a view of its input must not be modified in place; a clone may be.
        return tuple(tensor.clone() for tensor in tensors) if clone else tensors

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None, *grads)


def pass_through(output: Any, *, clone: bool) -> Any:
    """`output` with every tensor that has a history run through one autograd function.

    Args:
        output: of forward; the structure is kept.
        clone: copy the tensors, so that users may modify them in place.
    """
    is_rref, value = local_value_of_rref(output)
    leaves, structure = pytree_flatten(value if is_rref else output)
    places = [
        place
        for place, leaf in enumerate(leaves)
        if isinstance(leaf, Tensor) and leaf.grad_fn is not None
    ]
    if places:
        apply: Callable[..., tuple[Tensor, ...]] = _PassThrough.apply
        passed = apply(clone, *(leaves[place] for place in places))
        for place, tensor in zip(places, passed, strict=True):
            leaves[place] = tensor
    result = pytree_unflatten(leaves, structure)
    return type(output)(result) if is_rref else result

"""Tensors in nested containers (inputs and outputs of forward): find, map, cast, move.

Containers that are searched: lists, tuples, named tuples, dicts, sets, dataclasses and packed
sequences, nested. What holds no tensor to be replaced is returned as it is, so that a forward's
result reaches the user as the very object that the module returned.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

T = TypeVar("T")


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """The tensors in `tree`, in order."""
    if isinstance(tree, Tensor):
        yield tree
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        for field in dataclasses.fields(tree):
            yield from tensors_in(getattr(tree, field.name))
    elif isinstance(tree, PackedSequence):
        yield tree.data
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from tensors_in(value)
    elif isinstance(tree, (list, tuple, set)):
        for value in tree:
            yield from tensors_in(value)


def map_tensors(fn: Callable[[Tensor], Tensor], tree: T) -> T:
    """`tree` with `fn` applied to its tensors."""
    result: T = _map(fn, tree)
    return result


def _map(fn: Callable[[Tensor], Tensor], tree: Any) -> Any:
    if isinstance(tree, Tensor):
        return fn(tree)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        before = {field.name: getattr(tree, field.name) for field in dataclasses.fields(tree)}
        after = {name: _map(fn, value) for name, value in before.items()}
        changes = {name: value for name, value in after.items() if value is not before[name]}
        return dataclasses.replace(tree, **changes) if changes else tree
    if isinstance(tree, PackedSequence):
        # `batch_sizes` stays on CPU whatever happens to the rest.
        return PackedSequence(
            fn(tree.data),
            tree.batch_sizes,
            None if tree.sorted_indices is None else fn(tree.sorted_indices),
            None if tree.unsorted_indices is None else fn(tree.unsorted_indices),
        )
    if isinstance(tree, dict):
        changes = {}
        for key, value in tree.items():
            new = _map(fn, value)
            if new is not value:
                changes[key] = new
        if not changes:
            return tree
        mapped = copy.copy(tree)  # keeps the class, a default factory, an order
        mapped.update(changes)
        return mapped
    if isinstance(tree, (list, tuple, set)):
        values = list(tree)
        new_values = [_map(fn, value) for value in values]
        if all(new is old for new, old in zip(new_values, values, strict=True)):
            return tree
        if hasattr(tree, "_fields"):  # a named tuple
            return type(tree)(*new_values)
        return type(tree)(new_values)
    return tree


def cast_floating(tree: T, dtype: torch.dtype | None) -> T:
    """`tree` with its floating point tensors in `dtype` (None: unchanged)."""
    if dtype is None:
        return tree
    return map_tensors(
        lambda t: t.to(dtype) if t.is_floating_point() and t.dtype != dtype else t, tree
    )


def move(tree: T, device: torch.device) -> T:
    """`tree` with its tensors on `device`."""
    return map_tensors(lambda t: t if t.device == device else t.to(device), tree)

"""Validation of arguments before anything is sent, with the error messages of torch's gloo.

Every function raises RuntimeError unless it says otherwise. Messages begin with
`ProcessGroupGloo::<method>:` and the words that torch's users match on; more may follow, and in the
end `sign` tells the group and the rank.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn, SupportsIndex

import torch
from torch import Tensor

from impl.device import types_served
from impl.errors import describe_call


def refuse(method: str, text: str) -> NoReturn:
    raise RuntimeError(f"ProcessGroupGloo::{method}: {text}")


def sign(error: Exception, operation: str, group: Any) -> None:
    """Tell in a refusal's message whose call it was. Errors of `impl.errors` tell it already."""
    if type(error) in (RuntimeError, TypeError, ValueError):
        call = describe_call(operation, -1, group.group_name)
        error.args = (f"{error} [{call}, rank {group.rank()} of {group.size()}]",)


def plain_dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def check_root(method: str, root: int, world_size: int) -> None:
    if not 0 <= root < world_size:
        refuse(method, f"invalid root rank: {root} (the group has {world_size} ranks)")


def check_root_tensor(method: str, index: int, count: int) -> None:
    if not 0 <= index < count:
        refuse(method, f"invalid root tensor: {index} ({count} tensors given)")


def check_not_empty(method: str, tensors: Sequence[Tensor]) -> None:
    if not tensors:
        refuse(method, "requires non-empty tensor list")


def check_dense(method: str, tensors: Sequence[Tensor]) -> None:
    for tensor in tensors:
        if tensor.layout is not torch.strided:
            refuse(method, "only supports dense tensors")


def check_device(method: str, tensors: Sequence[Tensor]) -> None:
    """All on one device, of a kind that this backend serves."""
    device = tensors[0].device
    if device.type != "cpu" and device.type not in types_served():
        refuse(method, f"unsupported device type {device.type}")
    for tensor in tensors[1:]:
        if tensor.device != device:
            refuse(
                method,
                f"tensors must all be on the same device (expected {device}, got {tensor.device})",
            )


def check_like(method: str, tensors: Sequence[Tensor], model: Tensor, first: int = 0) -> None:
    """The dtype, device and shape of `model`. `first` is the index of the first tensor."""
    shape, device = model.shape, model.device
    check_dtypes(method, tensors, model.dtype, first)
    for index, tensor in enumerate(tensors, first):
        if tensor.device.type != device.type:
            refuse(
                method,
                f"invalid tensor type at index {index} (expected one on {device}, "
                f"got one on {tensor.device})",
            )
        if tensor.shape != shape:
            refuse(
                method,
                f"invalid tensor size at index {index} (expected {tuple(shape)}, "
                f"got {tuple(tensor.shape)})",
            )


def check_dtypes(
    method: str, tensors: Sequence[Tensor], dtype: torch.dtype, first: int = 0
) -> None:
    for index, tensor in enumerate(tensors, first):
        if tensor.dtype != dtype:
            refuse(
                method,
                f"invalid tensor type at index {index} (expected {plain_dtype(dtype)}, "
                f"got {plain_dtype(tensor.dtype)})",
            )


def check_same_layout(method: str, tensors: Sequence[Tensor]) -> None:
    layout = tensors[0].layout
    for index, tensor in enumerate(tensors):
        if tensor.layout is not layout:
            refuse(
                method,
                f"invalid tensor layout at index {index} (expected {layout}, got {tensor.layout})",
            )


def check_single_input(method: str, tensors: Sequence[Tensor]) -> None:
    if len(tensors) != 1:
        refuse(method, "requires a single-element input tensor list")


def check_single_output(method: str, tensors: Sequence[Tensor]) -> None:
    if len(tensors) != 1:
        refuse(method, "requires a single-element output tensor list")


def check_split_ranks(ranks: Sequence[int], world_size: int) -> None:
    if len(set(ranks)) != len(ranks):
        raise RuntimeError(f"Split ranks should not have duplicates: {list(ranks)}")
    if not ranks or not all(0 <= rank < world_size for rank in ranks):
        raise RuntimeError(f"Split ranks must be ranks of the group of {world_size}: {list(ranks)}")


def check_list_on_root(
    method: str, lists: Sequence[Sequence[Tensor]], which: str, world_size: int
) -> None:
    """which: "output" or "input"."""
    if len(lists) != 1:
        refuse(
            method,
            f"requires a single-element {which} list containing a list with {world_size} tensors.",
        )
    if len(lists[0]) != world_size:
        refuse(
            method,
            f"Incorrect {which} list size {len(lists[0])}. {which.capitalize()} list size should "
            f"be {world_size}, same as size of the process group.",
        )


def check_no_list_off_root(method: str, lists: Sequence[Sequence[Tensor]], which: str) -> None:
    if len(lists) != 0:
        refuse(method, f"requires empty {which} on non-root")


def check_gathered_numel(method: str, whole: Tensor, part: Tensor, world_size: int) -> None:
    """`whole` has room for one `part` a rank, in any shape."""
    if whole.dtype != part.dtype:
        refuse(
            method,
            f"invalid tensor type: tensor dtypes must match (expected {plain_dtype(part.dtype)}, "
            f"got {plain_dtype(whole.dtype)})",
        )
    if whole.numel() != part.numel() * world_size:
        refuse(
            method,
            f"invalid tensor size: {tuple(whole.shape)} has {whole.numel()} elements, but "
            f"{world_size} ranks times {tuple(part.shape)} makes {part.numel() * world_size}",
        )


def integer(what: str, given: SupportsIndex) -> int:
    """Python's own, from one of any type (numpy's, a tensor). Raises TypeError for what is none."""
    try:
        return operator.index(given)
    except TypeError as error:
        raise TypeError(f"{what} must be an integer: {error}") from error


def integers(which: str, given: Iterable[SupportsIndex]) -> list[int]:
    """The same for several."""
    try:
        return [operator.index(each) for each in given]
    except TypeError as error:
        raise TypeError(f"{which} must be integers: {error}") from error


def row_splits(
    method: str, which: str, splits: Sequence[int], tensor: Tensor, size: int
) -> list[int]:
    """Elements for each rank, from a caller's rows for each rank (none: equal shares).

    Rows are counted along dimension 0, as in `all_to_all_single`.
    """
    rows = tensor.size(0) if tensor.dim() else 0
    if not splits:
        if rows % size:
            raise RuntimeError(
                f"Tensor's dim 0 does not divide equally across group size: {method}: {which} has "
                f"{rows} rows for {size} ranks"
            )
        return [tensor.numel() // size] * size
    if len(splits) != size:
        raise RuntimeError(
            f"Number of tensor splits not equal to group size: {method}: {which}_split_sizes has "
            f"{len(splits)} entries for {size} ranks"
        )
    if min(splits) < 0:
        raise RuntimeError(
            f"Split sizes must not be negative: {method}: {which}_split_sizes is {list(splits)}"
        )
    if sum(splits) != rows:
        raise RuntimeError(
            f"Split sizes doesn't match total dim 0 size: {method}: {which}_split_sizes "
            f"{list(splits)} add up to {sum(splits)}, but {which} has {rows} rows"
        )
    row_numel = tensor.numel() // rows if rows else 0
    return [split * row_numel for split in splits]

"""Freeing and reallocating a tensor's storage in place, with checks."""

from __future__ import annotations

import torch


def resize_storage(tensor: torch.Tensor, numel: int) -> None:
    """Give the storage of `tensor` room for exactly `numel` elements (0 frees it)."""
    tensor.untyped_storage().resize_(numel * tensor.element_size())


def storage_numel(tensor: torch.Tensor) -> int:
    """Elements that the storage of `tensor` has room for at present."""
    return tensor.untyped_storage().size() // tensor.element_size()


def check_freed(tensor: torch.Tensor) -> None:
    if tensor.untyped_storage().size() != 0:
        raise AssertionError(
            "Tensor storage should have been resized to be 0 but got "
            f"{storage_numel(tensor)} elements"
        )


def check_sole_occupant(tensor: torch.Tensor) -> None:
    if tensor.storage_offset() != 0:
        raise AssertionError(
            "Freeing a tensor's storage is unsafe when it is not the sole occupant: "
            f"storage offset {tensor.storage_offset()}, storage size {storage_numel(tensor)}, "
            f"tensor shape {tuple(tensor.shape)}"
        )

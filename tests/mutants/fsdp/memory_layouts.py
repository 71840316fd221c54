"""Mutants of conformance/spec/fsdp/memory_layouts.py."""

from __future__ import annotations

from impl.fsdp.flat_param import packing
from tests.mutants.fsdp.kit import Swapped, always
from tests.mutants.kit import breaks


@breaks("fsdp/channels-last", says="is wrong|raised")
class IgnoresMemoryFormat(Swapped):
    """Parameters are flattened as they lie in memory, and viewed as if contiguous."""

    swaps = (
        (
            packing.FlatMetadata,
            "flatten_one",
            lambda _: (
                lambda self, i, tensor: tensor.permute(
                    *sorted(range(tensor.dim()), key=lambda d: -tensor.stride(d))
                ).reshape(-1)
            ),
        ),
        (packing, "_flat_stride", always(None)),
    )


@breaks("fsdp/memory-format-kept", says="strides in forward: rank 0 is wrong")
class ViewsAreRowMajor(Swapped):
    swaps = ((packing, "_flat_stride", always(None)),)


@breaks("fsdp/parameters-with-gaps", says="is wrong|raised")
class TakesWhatLiesInTheGaps(Swapped):
    swaps = ((packing, "_is_dense", always(True)),)

"""Mutants of conformance/spec/fsdp/interop.py."""

from __future__ import annotations

from impl.fsdp.flat_param import handle
from tests.mutants.fsdp.kit import Swapped
from tests.mutants.kit import breaks


@breaks("fsdp/with-torch-original-parameters", says="raised|is wrong|waited")
class AlignsToThirtyTwoBytes(Swapped):
    """Flat parameters have a layout other than torch's."""

    swaps = ((handle, "alignment_numel", lambda right: lambda size: 2 * right(size)),)

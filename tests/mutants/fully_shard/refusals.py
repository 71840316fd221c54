"""Mutants of conformance/spec/fully_shard/refusals.py."""

from __future__ import annotations

import functools
from typing import Any

import impl.fully_shard as package
from impl.fully_shard.module import FSDPModule
from impl.fully_shard.state import State
from impl.fully_shard.unit import Unit
from tests.mutants.fsdp.kit import Swapped
from tests.mutants.kit import breaks


def _quiet(right: Any) -> Any:
    @functools.wraps(right)
    def wrong(*args: Any, **kwargs: Any) -> Any:
        try:
            return right(*args, **kwargs)
        except Exception:  # whatever is refused
            return args[0]

    return wrong


@breaks("fully_shard/twice", says="nothing was raised")
@breaks("fully_shard/container", says="nothing was raised")
@breaks("fully_shard/scalar", says="nothing was raised")
@breaks("fully_shard/strided", says="nothing was raised")
@breaks("fully_shard/three-dimensions", says="nothing was raised")
@breaks("fully_shard/unnamed-replicas", says="nothing was raised")
@breaks("fully_shard/no-divisor", says="nothing was raised")
@breaks("fully_shard/no-number", says="nothing was raised")
@breaks("fully_shard/no-bool", says="nothing was raised")
@breaks("fully_shard/uneven-columns", says="nothing was raised")
@breaks("fully_shard/missing-dimension", says="nothing was raised")
@breaks("fully_shard/deepcopy", says="nothing was raised")
@breaks("fully_shard/missing-method", says="nothing was raised")
@breaks("fully_shard/other-to-prefetch", says="nothing was raised")
@breaks("fully_shard/several-dtypes", says="want AssertionError with")
@breaks("fully_shard/meta-in-forward", says="want RuntimeError with")
@breaks("fully_shard/layer-before-root", says="want RuntimeError with|nothing was raised")
@breaks("fully_shard/tied-across-units", says="nothing was raised")
@breaks("fully_shard/reset-of-a-layer", says="nothing was raised")
@breaks("fully_shard/no-buffers", says="nothing was raised")
@breaks("fully_shard/type-of-buffers", says="nothing was raised")
class RefusesNothing(Swapped):
    """What is refused is left undone, without an error."""

    swaps = (
        (package, "fully_shard", _quiet),
        (package, "register_fsdp_forward_method", _quiet),
        (State, "_find_root", _quiet),
        (Unit, "prepare", _quiet),
        (FSDPModule, "__deepcopy__", _quiet),
        (FSDPModule, "set_modules_to_forward_prefetch", _quiet),
        (FSDPModule, "set_reduce_scatter_max_input_buffers", _quiet),
        (FSDPModule, "set_reshard_after_forward", _quiet),
        (FSDPModule, "reset_iter_state", _quiet),
    )

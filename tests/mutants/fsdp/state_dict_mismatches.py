"""Mutants of conformance/spec/fsdp/state_dict_mismatches.py."""

from __future__ import annotations

from typing import Any

from impl.fsdp import api
from impl.fsdp.checkpoint import state_dict
from tests.mutants.fsdp.kit import Swapped
from tests.mutants.kit import breaks


def _never_strictly(right: Any) -> Any:
    def wrong(self: Any, entries: Any, strict: bool = True, assign: bool = False) -> Any:
        return right(self, entries, strict=False, assign=assign)

    return wrong


@breaks("fsdp/missing-key", says="said nothing")
@breaks("fsdp/unexpected-key", says="said nothing")
@breaks("fsdp/sharded-missing-key", says="was to raise")
class NeverLoadsStrictly(Swapped):
    swaps = ((api.FullyShardedDataParallel, "load_state_dict", _never_strictly),)


def _what_fits(right: Any) -> Any:
    def wrong(self: Any, entries: Any, strict: bool = True, assign: bool = False) -> Any:
        own = self.state_dict()
        fitting = {
            key: value
            for key, value in entries.items()
            if key not in own or value.shape == own[key].shape
        }
        return right(self, fitting, strict=strict, assign=assign)

    return wrong


@breaks("fsdp/wrong-shape", says=r'Missing key\(s\) in state_dict: "head.weight"')
class LeavesOutWhatDoesNotFit(Swapped):
    swaps = ((api.FullyShardedDataParallel, "load_state_dict", _what_fits),)


@breaks("fsdp/not-strict", says="what was told: rank . is wrong")
class TellsKeysWithTheWrappersNames(Swapped):
    swaps = ((state_dict, "clean_tensor_name", lambda _: lambda name: name),)

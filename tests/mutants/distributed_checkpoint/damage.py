"""Mutants of conformance/spec/distributed_checkpoint/damage.py."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException

from tests.mutants.distributed_checkpoint.kit import FunctionMutant
from tests.mutants.kit import breaks


@breaks("dcp/flipped-bits", says=r"loading: \(nothing was raised")
@breaks("dcp/torn-overwrite", says=r"it holds \[1.0, 2.0\]")
class HasTorchsFaults(FunctionMutant):
    """As torch does."""


@breaks("dcp/short-file", says=r"loading: \(nothing was raised")
@breaks("dcp/missing-file", says=r"loading: \(nothing was raised")
@breaks("dcp/short-metadata", says=r"loading: \(nothing was raised")
@breaks("dcp/torn-save", says=r"the torn one: \(nothing was raised")
class LoadsWhatItCan(FunctionMutant):
    @staticmethod
    def load(right: Any, state: Any, **how: Any) -> None:
        with contextlib.suppress(CheckpointException):
            right(state, **how)


@breaks("dcp/after-damage", says="CheckpointException")
class NeverLoadsAgain(FunctionMutant):
    @staticmethod
    def load(right: Any, state: Any, **how: Any) -> None:
        sign = Path(how["checkpoint_id"]).parent / "failed"
        if sign.exists():
            raise CheckpointException("it failed before", {})
        try:
            right(state, **how)
        except CheckpointException:
            sign.touch()
            raise

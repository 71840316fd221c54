"""Mutants of conformance/spec/fsdp/programs.py: features that work alone, and not together."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch

from impl.fsdp.api import FullyShardedDataParallel
from tests.mutants.fsdp.kit import Swapped
from tests.mutants.kit import breaks

_evaluated_last: WeakKeyDictionary[FullyShardedDataParallel, bool] = WeakKeyDictionary()


def _noting_evaluations(right: Any) -> Any:
    def wrong(self: Any, *args: Any, **kwargs: Any) -> Any:
        _evaluated_last[self] = not torch.is_grad_enabled()
        return right(self, *args, **kwargs)

    return wrong


def _halving_after_one(right: Any) -> Any:
    @contextlib.contextmanager
    def wrong(self: Any) -> Iterator[None]:
        halves = _evaluated_last.get(self, False)
        with right(self):
            yield
        for param in self.parameters() if halves else ():
            if param.grad is not None:
                param.grad.mul_(0.5)

    return wrong


@breaks("fsdp/any-order", says=r"(step \d, (loss \d|norm)|[\w.]+\.(weight|bias)): rank 0 is wrong")
class GradientsWithoutSyncAreHalvedAfterAnEvaluation(Swapped):
    """What accumulates under no_sync, right after a forward under no_grad, counts half."""

    swaps = (
        (FullyShardedDataParallel, "forward", _noting_evaluations),
        (FullyShardedDataParallel, "no_sync", _halving_after_one),
    )

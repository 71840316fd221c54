"""Mutants of conformance/spec/sync_batchnorm/under_ddp.py."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tests.mutants.kit import Patch, breaks
from tests.mutants.sync_batchnorm.forward import NormalisesAlone
from tests.mutants.sync_batchnorm.kit import Gradients, backward_as


@breaks("sync_batchnorm/under-ddp", says=r"rank \d is wrong|differ")
class TrainsAlone(NormalisesAlone):
    """DDP averages gradients of ranks that normalise by themselves."""


@breaks("sync_batchnorm/empty-under-ddp", says=r"not finite after step 1: .*weight")
class DividesByZeroForAnEmptyBatch(Patch):
    """The weight's gradient is NaN on a rank with an empty batch."""

    base = "impl"

    @staticmethod
    @contextmanager
    def patched() -> Iterator[None]:
        def change(ctx: Any, grads: Gradients) -> Gradients:
            is_empty = grads[0] is not None and grads[0].numel() == 0
            return (grads[0], grads[1] * torch.nan, *grads[2:]) if is_empty else grads

        with backward_as(change):
            yield

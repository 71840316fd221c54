"""Mutants of wrappers: a DDP or a SyncBatchNorm that is wrong, on a backend that is right."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from conformance.target import Target, load_target
from tests.mutants.kit import Mutant


class LayerMutant(Mutant):
    """Mixed into a SyncBatchNorm. Our own is what works on CPU."""

    base = "impl"

    @classmethod
    def target(cls) -> Target:
        base = load_target(cls.base)
        return replace(
            base,
            name=cls.__name__,
            imports=(*base.imports, cls.__module__),
            sync_batchnorm=f"{cls.__module__}:{cls.__qualname__}",
            deviations=(),
        )


class WrapperMutant(Mutant, DistributedDataParallel):
    """torch's wrapper; a mutant overrides what it breaks."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)  # type: ignore[no-untyped-call]

    @classmethod
    def target(cls) -> Target:
        base = load_target(cls.base)
        return replace(
            base,
            name=cls.__name__,
            imports=(*base.imports, cls.__module__),
            ddp=f"{cls.__module__}:{cls.__qualname__}",
            deviations=(),
        )

"""Mutants of conformance/spec/ddp/interface.py."""

from __future__ import annotations

from typing import Any

from impl.ddp.wrapper import api
from impl.ddp.wrapper.api import DistributedDataParallel
from tests.mutants.ddp.kit import DDPMutant, afterwards, constructor, instead
from tests.mutants.kit import breaks


@breaks("ddp/functional-transforms", says="AttributeError")
class TakesTransformsForSteps(DDPMutant):
    patched = instead(api, "transforms_are_active", lambda: False)


@breaks("ddp/signature", says="missing or with another default: .*bucket_cap_mb=None")
class TakesOptionsByNameAlone(DDPMutant):
    patched = constructor(
        lambda right: lambda self, module, **options: right(self, module, **options)
    )


@breaks("ddp/is-a-module", says="what it is: rank 0 is wrong")
class CountsItsCapInMegabytes(DDPMutant):
    @staticmethod
    def _in_megabytes(ddp: Any, *_: Any, **__: Any) -> None:
        ddp.bucket_bytes_cap //= 2**20

    patched = afterwards(DistributedDataParallel, "__init__", _in_megabytes)

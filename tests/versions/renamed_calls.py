"""A backend as it was written for torch 2.12: torch 2.13 calls three operations by other names.

So it was with Mooncake's (kvcache-ai/Mooncake#3122): a class in Python, which has the operations
under the names that torch 2.12 calls, and about which nothing is wrong there.

ci/versions --target tests.versions.renamed_calls:OLD --versions 2.12.1,2.13.0 --profile collectives
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from conformance.target import load_target

_ALWAYS = ("allreduce", "broadcast", "reduce", "allgather", "gather", "scatter", "reduce_scatter")
_POINT_TO_POINT = ("alltoall", "barrier", "send", "recv", "recv_anysource")
_UNTIL_2_12 = ("_allgather_base", "_reduce_scatter_base", "alltoall_base")
_SINCE_2_13 = ("all_gather_single", "reduce_scatter_single", "all_to_all_single")


class OldNames(dist.ProcessGroup):
    """torch's gloo with the methods that torch 2.12 calls, and no others."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # torch's stub lacks this form
        self.gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._name = self._description = ""

    def getBackendName(self) -> str:
        return "renamed"

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:
        return self._name

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    def getGroupDesc(self) -> str:
        return self._description


class BothNames(OldNames):
    """The same with the names that torch 2.13 calls: what mends it."""


def _method(name: str) -> Callable[..., Any]:
    return lambda self, *args, **kwargs: getattr(self.gloo, name)(*args, **kwargs)


for _name in (*_ALWAYS, *_POINT_TO_POINT, *_UNTIL_2_12):
    setattr(OldNames, _name, _method(_name))
for _old, _new in zip(_UNTIL_2_12, _SINCE_2_13, strict=True):
    setattr(BothNames, _new, _method(_old))

dist.Backend.register_backend("renamed_old", OldNames, devices=["cpu"])
dist.Backend.register_backend("renamed_both", BothNames, devices=["cpu"])

OLD = replace(
    load_target("torch"),
    name="written-for-2.12",
    backend="renamed_old",
    imports=(__name__,),
    ddp="",
    fsdp="",
    sync_batchnorm="",
)
MENDED = replace(OLD, backend="renamed_both")

"""A backend with three operations of gloo alone; its buggy twin broadcasts from a wrong root.

python -m conformance certify --target tests.zoo.three_operations:TARGET
"""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from conformance.capabilities import Capabilities
from conformance.target import Target, load_target


class ThreeOperations(dist.ProcessGroup):
    """all_gather, broadcast and barrier, by a gloo object that this one owns."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        dist.ProcessGroup.__init__(self, rank, size)  # type: ignore[call-arg]
        self.gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout)
        self.label, self.description = "", ""

    def allgather(self, outputs: Any, inputs: Any, opts: Any) -> dist.Work:
        work: dist.Work = self.gloo.allgather(outputs, inputs, opts)
        return work

    def broadcast(self, tensors: Any, opts: Any) -> dist.Work:
        work: dist.Work = self.gloo.broadcast(tensors, opts)
        return work

    def barrier(self, opts: Any) -> dist.Work:
        work: dist.Work = self.gloo.barrier(opts)
        return work

    def setGroupName(self, name: str) -> None:
        self.label = name

    def getGroupName(self) -> str:
        return self.label

    def setGroupDesc(self, description: str) -> None:
        self.description = description

    def getGroupDesc(self) -> str:
        return self.description

    def getBackendName(self) -> str:
        return "zoo_three"


class TranslatesTwice(ThreeOperations):
    """The bug: the root, a rank in the group already, is taken for a global one."""

    def broadcast(self, tensors: Any, opts: Any) -> dist.Work:
        members = dist.get_process_group_ranks(self)
        if opts.rootRank in members:
            opts.rootRank = members.index(opts.rootRank)
        return super().broadcast(tensors, opts)


def create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> ThreeOperations:
    return ThreeOperations(store, rank, size, timeout)


def create_buggy(store: dist.Store, rank: int, size: int, timeout: timedelta) -> ThreeOperations:
    return TranslatesTwice(store, rank, size, timeout)


dist.Backend.register_backend("zoo_three", create, devices=["cpu"])
dist.Backend.register_backend("zoo_three_buggy", create_buggy, devices=["cpu"])

GLOO = load_target("torch")
TARGET = Target(
    name="zoo-three",
    backend="zoo_three",
    imports=(__name__,),
    capabilities=Capabilities(
        ops=frozenset({"all_gather", "broadcast", "barrier"}),
        dtypes=GLOO.capabilities.dtypes,
        reduce_ops=frozenset(),
        features=frozenset({"nonblocking", "work_result"}),
    ),
    deviations=GLOO.deviations,
)
BUGGY = replace(TARGET, name="zoo-three-buggy", backend="zoo_three_buggy")

"""torchft's process groups as backends of torch.distributed, by the creators that it lacks.

torchft's groups are made without ranks; `configure` gives them a store, a rank and a world size.
It takes the address of a TCPStore, so rank 0 starts one and tells the others where it is.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torchft.process_group import (
    ErrorSwallowingProcessGroupWrapper,
    ProcessGroupBabyGloo,
    ProcessGroupGloo,
)


class AsDefaultGroup:
    """What torch asks of a default group, and torchft's groups do not say."""

    _given_rank = 0
    _server: dist.Store | None = None
    _name, _description = "", ""
    _device_types = (torch.device("cpu"),)

    def join(self, store: dist.Store, rank: int, size: int) -> Any:
        """Configure it, with a TCPStore that lives as long as the group."""
        if rank >= size:
            raise ValueError(f"rank {rank} of {size}")
        if rank == 0:
            self._server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            store.set("torchft", str(self._server.port))
        address = f"127.0.0.1:{int(store.get('torchft'))}/group"
        self.configure(address, f"rank {rank}", rank, size)  # type: ignore[attr-defined]  # of the group it is mixed into
        self._given_rank = rank
        if rank == 0:  # all have read it: each is connected with all others
            store.delete_key("torchft")
        return self

    def rank(self) -> int:
        """torchft's is always 0."""
        return self._given_rank

    def getGroupName(self) -> str:  # noqa: N802  # torch's name
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802  # torch's name
        self._name = name

    def getGroupDesc(self) -> str:  # noqa: N802  # torch's name
        return self._description

    def setGroupDesc(self, description: str) -> None:  # noqa: N802  # torch's name
        self._description = description


class Gloo(AsDefaultGroup, ProcessGroupGloo):  # type: ignore[misc]  # torchft may be missing
    """Gloo that can be configured again."""


class Baby(AsDefaultGroup, ProcessGroupBabyGloo):  # type: ignore[misc]  # torchft may be missing
    """Gloo in a process of its own."""


class Swallowing(AsDefaultGroup, ErrorSwallowingProcessGroupWrapper):  # type: ignore[misc]  # torchft may be missing
    """Gloo, with all_reduces that never raise."""


def gloo(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    """The creator that `register_backend` takes."""
    return Gloo(timeout).join(store, rank, size)


def baby(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    """The creator that `register_backend` takes."""
    return Baby(timeout).join(store, rank, size)


def swallowing(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    """The creator that `register_backend` takes."""
    return Swallowing(ProcessGroupGloo(timeout)).join(store, rank, size)


for _create in (gloo, baby, swallowing):
    dist.Backend.register_backend(f"torchft_{_create.__name__}", _create, devices=["cpu"])

"""torchft's process groups as backends of torch.distributed, by the creators that it lacks.

torchft's groups are made without ranks; `configure` gives them a store, a rank and a world size.
It takes the address of a TCPStore, so rank 0 starts one and tells the others where it is.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torchft.coordination import LighthouseServer
from torchft.manager import Manager
from torchft.process_group import (
    ErrorSwallowingProcessGroupWrapper,
    ManagedProcessGroup,
    ProcessGroupBabyGloo,
    ProcessGroupGloo,
)

HERE = "127.0.0.1"


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
            self._server = own_server()
            store.set("torchft", str(self._server.port))
        address = f"{HERE}:{int(store.get('torchft'))}/group"
        self.configure(address, f"rank {rank}", rank, size)  # type: ignore[attr-defined]  # of the group it is mixed into
        self._given_rank = rank
        if rank == 0:  # all have read it: each is connected with all others
            store.delete_key("torchft")
        return self

    def shutdown(self) -> None:
        """Called by `destroy_process_group`."""
        super().shutdown()  # type: ignore[misc]  # of the group it is mixed into
        self._server = None

    def rank(self) -> int:
        """torchft's is always 0."""
        return self._given_rank

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupDesc(self) -> str:
        return self._description

    def setGroupDesc(self, description: str) -> None:
        self._description = description


class Gloo(AsDefaultGroup, ProcessGroupGloo):  # type: ignore[misc]  # torchft may be missing
    """Gloo that can be configured again."""


class Baby(AsDefaultGroup, ProcessGroupBabyGloo):  # type: ignore[misc]  # torchft may be missing
    """Gloo in a process of its own."""


class Swallowing(AsDefaultGroup, ErrorSwallowingProcessGroupWrapper):  # type: ignore[misc]  # torchft may be missing
    """Gloo, with all_reduces that never raise."""


class Managed(AsDefaultGroup, ManagedProcessGroup):  # type: ignore[misc]  # torchft may be missing
    """Gloo, with all_reduces that a Manager counts and whose errors it keeps."""

    def shutdown(self) -> None:
        """Called by `destroy_process_group`."""
        self._manager.end()
        super().shutdown()


class ManagerOfARank(Manager):  # type: ignore[misc]  # torchft may be missing
    """A Manager of one rank, which is a replica by itself, as are all others.

    Rank 0 starts the server by which they find each other.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        if rank == 0:
            self.lighthouse = LighthouseServer(bind="[::]:0", min_replicas=size)
            store.set("torchft lighthouse", self.lighthouse.address())
        self.server = own_server()
        super().__init__(
            pg=ProcessGroupGloo(timeout),
            load_state_dict=None,
            state_dict=None,
            min_replica_size=size,
            use_async_quorum=False,
            init_sync=False,
            timeout=timeout,
            rank=0,
            world_size=1,
            store_addr=HERE,
            store_port=self.server.port,
            lighthouse_addr=store.get("torchft lighthouse").decode(),
            replica_id=f"rank_{rank}",
            hostname=HERE,
        )
        self.start_quorum(allow_heal=False)

    def end(self) -> None:
        """Stop its threads, and the server."""
        self.shutdown()
        if hasattr(self, "lighthouse"):
            self.lighthouse.shutdown()


def own_server() -> dist.TCPStore:
    # Without libuv, which leaves a pipe in the process for good.
    return dist.TCPStore(HERE, 0, is_master=True, wait_for_workers=False, use_libuv=False)


def gloo(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    """The creator that `register_backend` takes."""
    return Gloo(timeout).join(store, rank, size)


def baby(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    """The creator that `register_backend` takes."""
    return Baby(timeout).join(store, rank, size)


def swallowing(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    """The creator that `register_backend` takes."""
    return Swallowing(ProcessGroupGloo(timeout)).join(store, rank, size)


def managed(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    """The creator that `register_backend` takes."""
    group = Managed(ManagerOfARank(store, rank, size, timeout))
    group._given_rank = rank
    return group


for _create in (gloo, baby, swallowing, managed):
    dist.Backend.register_backend(f"torchft_{_create.__name__}", _create, devices=["cpu"])

"""torch's stores as a target names them (`store = "conformance.stores:tcp_store"`).

A target file says how its store is made: a function that each rank calls once, with the arguments
of those below. It returns a `torch.distributed.Store`; of something else that has its methods
neither a group nor a `PrefixStore` can be made. What a store lacks (clones, queues, several
processes, ...) it does not claim: see `python -m conformance list --capabilities`.

    rank, world_size: of the caller.
    host: the address of rank 0, as every rank reaches it.
    meeting: a store that all ranks share, to tell each other where the new one is.
    folder: an empty folder that all ranks of this host share.
    timeout: of the store's calls.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import torch.distributed as dist


def tcp_store(
    rank: int,
    world_size: int,
    host: str,
    meeting: dist.Store,
    folder: str,
    timeout: timedelta,
    *,
    use_libuv: bool = True,
) -> dist.Store:
    """A TCPStore; rank 0 has its server, on libuv unless it is told otherwise."""
    if rank > 0:
        port = int(meeting.get("port"))
        return dist.TCPStore(host, port, wait_for_workers=False, timeout=timeout)
    store = dist.TCPStore(
        host, 0, is_master=True, wait_for_workers=False, timeout=timeout, use_libuv=use_libuv
    )
    meeting.set("port", str(store.port))
    return store


def threaded_tcp_store(
    rank: int, world_size: int, host: str, meeting: dist.Store, folder: str, timeout: timedelta
) -> dist.Store:
    """A TCPStore whose server is the older one, a thread that polls."""
    return tcp_store(rank, world_size, host, meeting, folder, timeout, use_libuv=False)


def file_store(
    rank: int, world_size: int, host: str, meeting: dist.Store, folder: str, timeout: timedelta
) -> dist.Store:
    """A FileStore in the folder."""
    store = dist.FileStore(str(Path(folder) / "store"), world_size)
    store.set_timeout(timeout)
    return store


def hash_store(
    rank: int, world_size: int, host: str, meeting: dist.Store, folder: str, timeout: timedelta
) -> dist.Store:
    """A HashStore, which is of one process alone."""
    store = dist.HashStore()
    store.set_timeout(timeout)
    return store

"""Helpers of cases that call init_process_group themselves, and wait until all ranks have."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from conformance import Me


def start(
    me: Me,
    where: str | dist.Store,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    timeout: timedelta | None = None,
    **more: Any,
) -> None:
    """Make the default group of the target.

    where: a store, or a place in the world's store that no other group has been made on.
    rank, world_size: this rank's and the world's, unless they are given.
    more: further arguments of init_process_group.
    """
    dist.init_process_group(
        me.target.backend,
        store=dist.PrefixStore(where, me.store) if isinstance(where, str) else where,
        rank=me.rank if rank is None else rank,
        world_size=me.world_size if world_size is None else world_size,
        timeout=timeout or timedelta(seconds=me.group_timeout_s),
        pg_options=me.options,
        **more,
    )

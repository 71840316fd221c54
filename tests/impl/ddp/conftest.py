"""Fixtures of the DDP tests: two rank processes, or a group of one rank in this process."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from tests.impl.ddp.ranks import Ranks


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Two rank processes on torch's gloo."""
    ranks = Ranks(2, tmp_path_factory.mktemp("stores"))
    yield ranks
    ranks.stop()


# The last groups of one: a callback of torch's PowerSGD may hold its group for a moment longer than
# the test does, and torch's gloo dies if it is freed then ("groups/last-held-by-a-callback").
_kept: deque[dist.ProcessGroup] = deque(maxlen=8)


@pytest.fixture
def one_rank() -> Iterator[dist.ProcessGroup]:
    """A group of one, in this process: everything but the meeting of ranks."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = dist.distributed_c10d._get_default_group()
    _kept.append(group)
    yield group
    dist.destroy_process_group()

"""Fixtures of the DDP tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from tests.impl.ddp.ranks import Ranks


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Ranks]:
    """Two rank processes on torch's gloo."""
    ranks = Ranks(2)
    yield ranks
    ranks.close()


@pytest.fixture
def one_rank() -> Iterator[dist.ProcessGroup]:
    """A group of one, in this process: everything but the meeting of ranks."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.distributed_c10d._get_default_group()
    dist.destroy_process_group()

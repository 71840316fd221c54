"""Fixtures of the FSDP tests: two or four rank processes, or one rank in this process."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from tests.impl.fsdp.ranks import Ranks


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Two rank processes on torch's gloo."""
    ranks = Ranks(2, tmp_path_factory.mktemp("stores"))
    yield ranks
    ranks.stop()


@pytest.fixture(scope="session")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Four rank processes on torch's gloo, for hybrid sharding two by two."""
    ranks = Ranks(4, tmp_path_factory.mktemp("stores"))
    yield ranks
    ranks.stop()


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A world of one rank in this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def no_switch_warning() -> Iterator[None]:
    """One rank cannot shard, which the class says each time."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="FSDP is switching to use `NO_SHARD`")
        yield

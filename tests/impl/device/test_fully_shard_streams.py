"""`impl.fully_shard` on the simulated device: what its streams, events and lifetimes are for."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh

import impl.fully_shard
from impl.device import substituted_handle
from impl.fully_shard import api, fully_shard
from impl.fully_shard.mesh import Division
from impl.testing.device.handles import SimulatedHandle
from impl.testing.device.schedule import Drawn, Eager
from impl.testing.device.simulated import SimulatedDevice
from tests.impl.device.fully_sharded import (
    FullyShardedPrograms,
    imagined_groups,
    imagined_mesh,
    moving,
)
from tests.impl.device.left_out import assert_right, never_run, not_missed, run, sources_of

FILES = sources_of(impl.fully_shard)


@contextmanager
def surroundings(device: SimulatedDevice, replicas: int) -> Iterator[DeviceMesh]:
    groups = imagined_groups(device, replicas)
    with (
        substituted_handle(SimulatedHandle(device)),
        mock.patch.object(api, "read_mesh", lambda mesh: Division(mesh, *groups)),
        device,
        moving(device),
    ):
        yield imagined_mesh(replicas)


PROGRAMS = FullyShardedPrograms(fully_shard, surroundings).all


@pytest.mark.parametrize("name", PROGRAMS)
@settings(max_examples=2, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_any_order_that_the_events_permit_gives_the_same(name: str, seed: int) -> None:
    assert_right(run(PROGRAMS[name], Drawn(seed)), _in_order(name))


@functools.cache
def _in_order(name: str) -> Any:
    return run(PROGRAMS[name], Eager())


def test_every_wait_record_and_pin_is_needed() -> None:
    removed, unmissed = not_missed(PROGRAMS, FILES)
    print(f"impl.fully_shard: {removed} removed, {removed - len(unmissed)} found")
    assert removed >= 15
    assert unmissed == []
    assert never_run(PROGRAMS, FILES) == []

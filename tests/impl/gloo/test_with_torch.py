"""Torch on top of the backend: compilers, profiles, DDP, FSDP; and what only processes can show."""

from __future__ import annotations

import gc
import os
import tempfile
import threading
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn

import impl.gloo  # noqa: F401  # registers the backend
from impl import errors
from tests.impl.gloo.ranks import on_processes

TIMEOUT = timedelta(seconds=30)


@pytest.fixture
def store_path() -> Any:
    with tempfile.TemporaryDirectory() as directory:
        yield str(Path(directory) / "store")


def join(rank: int, world_size: int, store_path: str, backend: str = "pygloo") -> None:
    """Make the default group."""
    # torch warns about names that newer versions call otherwise
    warnings.simplefilter("ignore", FutureWarning)
    dist.init_process_group(
        backend,
        store=dist.FileStore(store_path, world_size),
        rank=rank,
        world_size=world_size,
        timeout=TIMEOUT,
    )


# -- the default group


def make_and_destroy(rank: int, world_size: int, store_path: str) -> None:
    join(rank, world_size, store_path)
    dist.all_reduce(torch.ones(1))
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=7))
    world: Any = dist.group.WORLD
    assert {device.type for device in world._device_types} == {"cpu", "cuda"}
    assert world.options._timeout == timedelta(seconds=7)
    dist.barrier()
    del world
    dist.destroy_process_group()
    gc.collect()
    assert [thread.name for thread in threading.enumerate()] == ["MainThread"]
    assert "pygloo" not in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_default_group_is_set_up_and_leaves_nothing_behind(
    world_size: int, store_path: str
) -> None:
    on_processes(world_size, make_and_destroy, store_path)


def compiled_functions(rank: int, world_size: int, store_path: str) -> list[list[float]]:
    join(rank, world_size, store_path)
    other = 1 - rank

    def exchange(y: torch.Tensor) -> None:
        requests = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, y.clone(), other), dist.P2POp(dist.irecv, y, other)]
        )
        for request in requests:
            request.wait()

    def gather(y: torch.Tensor) -> None:
        parts = [torch.zeros(2), torch.zeros(2)] if rank == 0 else None
        dist.gather(y, parts)
        y += 0 if parts is None else parts[1]

    calls: list[Callable[[torch.Tensor], Any]] = [
        lambda y: dist.broadcast(y, 1),
        lambda y: cast(dist.Work, dist.all_reduce(y, async_op=True)).wait(),
        lambda y: dist.reduce(y, 0),
        lambda y: dist.send(y, 1) if rank == 0 else dist.recv(y, 0),
        gather,
        exchange,
    ]
    results = []
    for call in calls:

        @torch.compile(backend="eager")
        def compiled(x: torch.Tensor, call: Callable[[torch.Tensor], Any] = call) -> torch.Tensor:
            y = x * 2
            call(y)
            return y / 2

        results.append(compiled(torch.ones(2) + rank).tolist())
    dist.destroy_process_group()
    return results


def test_collectives_in_compiled_functions(store_path: str) -> None:
    low, high, both = [1.0, 1.0], [2.0, 2.0], [3.0, 3.0]
    assert on_processes(2, compiled_functions, store_path) == [
        [high, both, both, low, both, high],
        [high, both, high, low, high, low],
    ]


def profiled(rank: int, world_size: int, store_path: str) -> list[tuple[str, Any, bool]]:
    """Name and shapes of each of the backend's ranges, and whether it is one of its own."""
    join(rank, world_size, store_path)
    with torch.autograd.profiler.profile(record_shapes=True) as profile:
        dist.all_reduce(torch.ones(2))
        dist.all_reduce(torch.ones(2).to_sparse())
        work = dist.broadcast(torch.ones(3, 2), 0, async_op=True)
        assert work is not None
        work.wait()
        dist.all_gather_into_tensor(torch.ones(4), torch.ones(2))
        if rank == 0:
            dist.send(torch.ones(1), 1)
        else:
            dist.recv(torch.ones(1))
    dist.destroy_process_group()
    return [
        (event.name, event.input_shapes, event.is_async)
        for event in profile.function_events
        if event.name.startswith("pygloo")
    ]


def test_profiler_ranges_are_named_backend_then_operation_in_torchs_words(store_path: str) -> None:
    for rank, ranges in enumerate(on_processes(2, profiled, store_path)):
        assert ranges == [
            ("pygloo:all_reduce", [[2]], True),
            ("pygloo:sparse_all_reduce", [[2]], True),
            ("pygloo:broadcast", [[3, 2]], True),
            ("pygloo:all_gather", [[2]], True),
            (["pygloo:send", "pygloo:recvAnySource"][rank], [[1]], True),
        ]


# -- training


def losses(module: nn.Module, rank: int) -> list[float]:
    optimizer = torch.optim.Adam(module.parameters(), 1e-2)
    torch.manual_seed(100 + rank)
    seen = []
    for _ in range(4):
        loss = module(torch.randn(8, 20)).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.item())
    return seen


def new_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(20, 50), nn.BatchNorm1d(50), nn.ReLU(), nn.Linear(50, 50), nn.Linear(50, 10)
    )


def train(rank: int, world_size: int, store_path: str, backend: str) -> dict[str, list[float]]:
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.nn.parallel import DistributedDataParallel

    join(rank, world_size, store_path + backend, backend)
    found = {"ddp": losses(DistributedDataParallel(new_model()), rank)}
    small_buckets = DistributedDataParallel(
        new_model(), bucket_cap_mb=0.001, gradient_as_bucket_view=True, static_graph=True
    )
    found["small buckets"] = losses(small_buckets, rank)
    hooked: Any = DistributedDataParallel(new_model())
    state = powersgd.PowerSGDState(None, 1, start_powerSGD_iter=2)
    hooked.register_comm_hook(state, powersgd.powerSGD_hook)
    found["powersgd"] = losses(hooked, rank)
    sharded = FullyShardedDataParallel(
        new_model(), device_id=torch.device("cpu"), use_orig_params=True
    )
    found["fsdp"] = losses(sharded, rank)
    dist.destroy_process_group()
    return found


def test_ddp_and_fsdp_train_as_on_torchs_gloo(store_path: str) -> None:
    reference = on_processes(2, train, store_path, "gloo")
    assert on_processes(2, train, store_path, "pygloo") == reference


# -- death


def exits() -> None:
    os._exit(0)


def averages_alone(rank: int, world_size: int, store_path: str) -> tuple[str, type, str]:
    """What torch's DDP raises in backward, and the error of an all_reduce's future."""
    join(rank, world_size, store_path)
    model = nn.parallel.DistributedDataParallel(nn.Linear(1, 1))
    loss = model(torch.ones(1, 1)).sum()
    group = dist.new_group()
    dist.barrier()
    if rank == 1:
        exits()
    with pytest.raises(RuntimeError) as of_backward:
        loss.backward()
    work = dist.all_reduce(torch.ones(1), group=group, async_op=True)
    assert work is not None
    with pytest.raises(errors.CommunicationError) as of_future:
        work.get_future().wait()
    return str(of_backward.value), of_future.type, str(of_future.value)


def test_torchs_ddp_raises_when_a_rank_is_lost(store_path: str) -> None:
    of_backward, kind, of_future = on_processes(2, averages_alone, store_path, may_die=(1,))[0]
    assert "PeerLost: all_reduce" in of_backward
    assert "lost rank 1 of 2" in of_backward
    assert kind is errors.PeerLost
    assert "lost rank 1 of 2" in of_future


def forked(rank: int, world_size: int, store_path: str) -> bytes:
    join(rank, world_size, store_path)
    dist.barrier()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            dist.all_reduce(torch.ones(1))
        except errors.Aborted as error:
            os.write(write, str(error).encode())
        os._exit(0)
    os.waitpid(child, 0)
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert tensor.item() == world_size
    dist.destroy_process_group()
    return os.read(read, 1000)


def test_a_forked_child_is_told_that_the_group_is_not_its_own(store_path: str) -> None:
    for message in on_processes(2, forked, store_path):
        assert b"belongs to the process that created it" in message


def never_destroys(rank: int, world_size: int, store_path: str) -> None:
    join(rank, world_size, store_path)
    work = dist.all_reduce(torch.ones(1), async_op=True)
    assert work is not None
    work.wait()


def test_a_process_that_does_not_destroy_its_group_ends(store_path: str) -> None:
    on_processes(2, never_destroys, store_path)

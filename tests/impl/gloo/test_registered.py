"""`allocate_tensor`: what it gives, that collectives are right on it, and where it gives less."""

from __future__ import annotations

import os
import pickle
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from impl import errors
from impl.fully_shard import fully_shard
from impl.gloo import ProcessGroupGloo
from impl.torch_private import all_gather_single, reduce_scatter_single
from impl.transport.shm import arena
from tests.impl.gloo.ranks import in_groups, on_processes

NUMEL = 600_000  # 2.4 MB of float32: several segments


def is_registered(tensor: Tensor) -> bool:
    mine = arena.current()
    return mine is not None and mine.offset_of(tensor.data_ptr(), tensor.nbytes) > 0


def join(rank: int, world_size: int, path: str) -> ProcessGroupGloo:
    store = dist.FileStore(path, world_size)
    timeout = timedelta(seconds=30)
    dist.init_process_group(
        "pygloo", store=store, rank=rank, world_size=world_size, timeout=timeout
    )
    assert isinstance(dist.group.WORLD, ProcessGroupGloo)
    return dist.group.WORLD


def test_sizes_and_dtypes() -> None:
    def allocate(group: ProcessGroupGloo) -> None:
        assert group.supports_tensor_alloc("cpu")
        assert not group.supports_tensor_alloc(torch.device("cuda"))
        by_number = group.allocate_tensor(12, dtype=torch.int16, device=torch.device("cpu"))
        assert (by_number.shape, by_number.dtype) == ((12,), torch.int16)
        by_shape = group.allocate_tensor((3, 4))
        assert (by_shape.shape, by_shape.dtype) == ((3, 4), torch.get_default_dtype())
        assert is_registered(by_number)
        assert is_registered(by_shape)
        assert group.allocate_tensor((3, 0)).shape == (3, 0)
        with torch.inference_mode():
            assert not group.allocate_tensor(3).is_inference()

    in_groups(2, allocate)


def test_without_shared_memory_tensors_are_ordinary(monkeypatch: pytest.MonkeyPatch) -> None:
    def allocate(group: ProcessGroupGloo) -> None:
        assert not group.supports_tensor_alloc("cpu")
        tensor = group.allocate_tensor((2, 3), dtype=torch.float64)
        assert tensor.shape == (2, 3)
        assert not is_registered(tensor)

    in_groups(1, allocate)
    in_groups(2, allocate, transport="tcp")
    monkeypatch.setenv(arena.LIMIT_VARIABLE, "0")
    in_groups(2, allocate)


def test_an_arena_that_is_full_gives_way_to_ordinary_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(arena.LIMIT_VARIABLE, str(NUMEL * 4 + (64 << 10)))

    def fill(group: ProcessGroupGloo) -> tuple[bool, Tensor]:
        group.barrier().wait()
        tensor = group.allocate_tensor(NUMEL).fill_(group.rank() + 1.0)
        group.allreduce([tensor]).wait()
        return is_registered(tensor), tensor

    results = in_groups(2, fill)  # both ranks share the arena of this process
    assert sorted(registered for registered, _ in results) == [False, True]
    assert all(tensor.eq(3).all() for _, tensor in results)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64, torch.complex64])
@pytest.mark.parametrize("op", [dist.ReduceOp.SUM, dist.ReduceOp.AVG])
def test_every_reduction_is_what_it_is_on_ordinary_memory(
    dtype: torch.dtype, op: dist.ReduceOp.RedOpType
) -> None:
    def reduce(group: ProcessGroupGloo) -> None:
        generator = torch.Generator().manual_seed(group.rank())
        given = (torch.randn(NUMEL, generator=generator) * 100).to(dtype)
        ordinary, first = given.clone(), group.allocate_tensor(NUMEL, dtype=dtype)
        dist_op = impl_options(op)
        group.allreduce([ordinary], dist_op).wait()
        for _ in range(2):
            first.copy_(given)
            group.allreduce([first], dist_op).wait()
            assert torch.equal(first, ordinary)

    in_groups(3, reduce)


def impl_options(op: dist.ReduceOp.RedOpType) -> Any:
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(op)
    return options


def test_views_that_are_not_contiguous_take_the_ordinary_road() -> None:
    def reduce(group: ProcessGroupGloo) -> None:
        whole = group.allocate_tensor((1000, 1200)).fill_(1.0)
        group.allreduce([whole]).wait()
        for _ in range(2):
            whole.fill_(1.0)
            group.allreduce([whole[:, ::2]]).wait()
            assert whole[:, ::2].eq(2).all()
            assert whole[:, 1::2].eq(1).all()
        group.allreduce([whole.t()]).wait()
        assert whole[:, ::2].eq(4).all()

    in_groups(2, reduce)


def test_groups_and_their_subgroups_share_tensors() -> None:
    def reduce(group: ProcessGroupGloo) -> None:
        tensor = group.allocate_tensor(NUMEL)
        pair = group.split_group([2, 0], group_name="pair")
        for _ in range(2):
            tensor.fill_(group.rank() + 1.0)
            if pair is not None:
                pair.allreduce([tensor]).wait()
                assert tensor.eq(4).all()
            group.allreduce([tensor]).wait()
            assert tensor.eq(10).all()
        if pair is not None:
            pair.shutdown()

    in_groups(3, reduce)


def test_pickled_and_shared_tensors_are_ordinary() -> None:
    def move(group: ProcessGroupGloo) -> None:
        tensor = group.allocate_tensor(NUMEL).fill_(group.rank() + 1.0)
        copy = pickle.loads(pickle.dumps(tensor))
        assert not is_registered(copy)
        group.allreduce([tensor]).wait()
        assert torch.equal(copy, torch.full((NUMEL,), group.rank() + 1.0))
        tensor.share_memory_()
        assert not is_registered(tensor)
        group.allreduce([tensor]).wait()
        assert tensor.eq(6).all()

    in_groups(2, move)


def test_asynchronous_calls_may_be_many() -> None:
    def reduce(group: ProcessGroupGloo) -> None:
        options = impl_options(dist.ReduceOp.SUM)
        options.asyncOp = True
        tensors = [group.allocate_tensor(NUMEL).fill_(float(i)) for i in range(6)]
        works = [group.allreduce([tensor], options) for tensor in tensors]
        for number, (work, tensor) in enumerate(zip(works, tensors, strict=True)):
            work.wait()
            assert tensor.eq(2.0 * number).all()

    in_groups(2, reduce)


# -- in processes


def uses_all(rank: int, world_size: int, path: str) -> list[str]:
    """torch.distributed's functions, with inputs that are changed as soon as the call has ended."""
    group = join(rank, world_size, path)
    n = NUMEL // world_size * world_size
    ranks = torch.arange(1.0, world_size + 1)
    wrong = []
    for round_ in range(3):
        x = group.allocate_tensor(n).fill_(rank + 1.0)
        dist.broadcast(x, round_ % world_size)
        wrong += [] if x.eq(round_ % world_size + 1).all() else ["broadcast"]
        x.fill_(rank + 1.0)
        gathered = torch.empty(world_size, n)
        all_gather_single(gathered.view(-1), x, group, False)
        x.fill_(-1.0)
        wrong += [] if torch.equal(gathered[:, 7], ranks) else ["all_gather_into_tensor"]
        x.fill_(rank + 1.0)
        scattered = torch.empty(n // world_size)
        reduce_scatter_single(scattered, x, group, False)
        x.fill_(-1.0)
        wrong += [] if scattered.eq(ranks.sum()).all() else ["reduce_scatter_tensor"]
        x.fill_(rank + 1.0)
        exchanged = torch.empty(world_size, n // world_size)
        dist.all_to_all_single(exchanged.view(-1), x)
        x.fill_(-1.0)
        wrong += [] if torch.equal(exchanged[:, 7], ranks) else ["all_to_all_single"]
    dist.destroy_process_group()
    wrong += [] if x.fill_(5.0).eq(5).all() else ["after the end"]
    return wrong


@pytest.mark.parametrize("world_size", [2, 3])
def test_collectives_between_processes(world_size: int, tmp_path: Path) -> None:
    assert on_processes(world_size, uses_all, str(tmp_path / "store")) == [[]] * world_size


def forks(rank: int, world_size: int, path: str) -> list[str]:
    group = join(rank, world_size, path)
    x = group.allocate_tensor(NUMEL).fill_(rank + 1.0)
    dist.all_reduce(x)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writing)
        os.read(reading, 1)  # until the parent has written to its own
        seen = x.eq(3).all()
        x.fill_(9.0)
        os._exit(0 if seen and x.eq(9).all() else 1)
    os.close(reading)
    x.fill_(4.0)
    os.write(writing, b"x")
    os.close(writing)
    status = os.waitpid(child, 0)[1]
    wrong = [] if status == 0 else [f"the child: {os.waitstatus_to_exitcode(status)}"]
    wrong += [] if x.eq(4).all() else ["the child wrote to its parent's tensor"]
    dist.all_reduce(x)
    wrong += [] if x.eq(8).all() else ["the sum"]
    dist.destroy_process_group()
    return wrong


def test_a_forked_child_has_a_copy(tmp_path: Path) -> None:
    assert on_processes(2, forks, str(tmp_path / "store")) == [[], []]


def frees_in_a_fork(rank: int, world_size: int, path: str) -> list[str]:
    arena._KEPT_NBYTES = 4096  # all else goes back to the system with the last tensor
    group = join(rank, world_size, path)
    x = group.allocate_tensor(NUMEL).fill_(3.0)
    child = os.fork()
    if child == 0:
        del x
        os._exit(int(is_registered(group.allocate_tensor(NUMEL))))
    status = os.waitpid(child, 0)[1]
    wrong = [] if status == 0 else ["the child allocates from its parent's arena"]
    wrong += [] if x.eq(3).all() else ["what the child freed is gone"]
    dist.destroy_process_group()
    return wrong


def test_a_forked_child_frees_nothing_of_its_parent(tmp_path: Path) -> None:
    assert on_processes(2, frees_in_a_fork, str(tmp_path / "store")) == [[], []]


def is_killed(rank: int, world_size: int, path: str) -> Any:
    group = join(rank, world_size, path)
    x = group.allocate_tensor(NUMEL).fill_(1.0)
    dist.all_reduce(x)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    x.fill_(1.0)
    with pytest.raises(errors.PeerLost, match="lost rank 1 of 3"):
        dist.all_reduce(x)
    return bool(x.fill_(2.0).eq(2).all())


def shared_files() -> set[str]:
    """Shared memory that has a name, but for what MPI has, which other tests may run meanwhile."""
    return {n for n in os.listdir("/dev/shm") if not n.startswith(("sm_segment", "mpich_"))}


def test_a_killed_rank_leaves_nothing(tmp_path: Path) -> None:
    before = shared_files()
    assert on_processes(3, is_killed, str(tmp_path / "store"), may_die=(1,)) == [True, None, True]
    assert shared_files() - before == set()


def test_the_backend_of_a_group_offers_the_same() -> None:
    def ask(group: ProcessGroupGloo) -> None:
        backend = group._get_backend(torch.device("cpu"))
        assert backend.supports_tensor_alloc(torch.device("cpu"))
        tensor = backend.allocate_tensor(5, dtype=torch.float16, device=torch.device("cpu"))
        assert is_registered(tensor)

    in_groups(2, ask)


def trains_with_fully_shard(rank: int, world_size: int, path: str) -> list[str]:
    """torch's FSDP2, and ours, with and without memory from the group."""
    join(rank, world_size, path)
    mesh = dist.init_device_mesh("cpu", (world_size,))
    trained: dict[str, list[Tensor]] = {}
    for name, wrap in (("torch's", torch_fully_shard), ("ours", fully_shard)):
        for from_group in (True, False):
            torch.manual_seed(0)
            model = torch.nn.Sequential(torch.nn.Linear(700, 901), torch.nn.Linear(901, 700))
            sharded: Any = wrap(model, mesh=mesh)
            sharded.set_allocate_memory_from_process_group_for_comm(from_group)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for number in range(3):
                optimizer.zero_grad()
                sharded(torch.full((2, 700), 1.0 + rank + number)).mean().backward()
                optimizer.step()
            shards = [param.to_local() for param in model.parameters()]  # type: ignore[attr-defined]  # DTensors
            trained[f"{name}, {from_group}"] = shards
    first = trained["torch's, False"]
    return [
        name
        for name, shards in trained.items()
        if not all(torch.equal(one, other) for one, other in zip(shards, first, strict=True))
    ]


def test_fully_shard_with_memory_from_the_group(tmp_path: Path) -> None:
    assert on_processes(2, trains_with_fully_shard, str(tmp_path / "store")) == [[], []]

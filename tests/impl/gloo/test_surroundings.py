"""A group is independent of the program's inference mode and default device."""

from __future__ import annotations

import ast
import contextlib
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._device import _device_constructors

import impl
from impl.device import HostHandle, substituted_handle
from impl.gloo import Options, ProcessGroupGloo
from tests.impl.gloo.ranks import in_groups
from tests.impl.threads import on_threads

each_transport = pytest.mark.parametrize("transport", ["shm", "tcp", "gloo"])
SMALL, LARGE = 6, 40_002


def filled(rank: int, numel: int) -> Tensor:
    return torch.full((numel,), rank + 1.0, device="cpu")


def everything(group: ProcessGroupGloo, numel: int) -> None:
    rank, n = group.rank(), group.size()
    total = sum(range(1, n + 1))

    def each() -> list[Tensor]:
        return [filled(r, numel) for r in range(n)]

    x = filled(rank, numel)
    group.allreduce([x]).wait()
    assert x.unique().tolist() == [total]
    x = filled(rank, numel)
    group.reduce([x], 0).wait()
    group.broadcast([x], 0).wait()
    assert x.unique().tolist() == [total]
    group.allreduce([x.half()], op=dist.ReduceOp.AVG).wait()
    group.allreduce_coalesced([filled(rank, numel), filled(rank, numel)]).wait()
    outputs = each()
    group.allgather([outputs], [filled(rank, numel)]).wait()
    assert all(map(torch.equal, outputs, each()))
    group.allgather_coalesced([each() for _ in range(n)], each()).wait()
    whole = torch.cat(each())
    group.all_gather_single(whole, filled(rank, numel)).wait()
    assert torch.equal(whole, torch.cat(each()))
    group.gather([outputs] if rank == 0 else [], [filled(rank, numel)], 0).wait()
    group.scatter([x], [outputs] if rank == 0 else [], 0).wait()
    assert torch.equal(x, filled(rank, numel))
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
        group.reduce_scatter([x], [each()], op=op).wait()
        group.reduce_scatter_single(x, whole).wait()
    assert torch.equal(x, n * filled(rank, numel))
    group.all_to_all_single(whole, whole.clone(), [], []).wait()
    group.alltoall(outputs, each()).wait()
    for count in (2, 0):
        rows, values = filled(0, count).cumsum(0)[None].long() - 1, filled(rank, count)
        sparse = torch.sparse_coo_tensor(rows, values, (3,), device="cpu", check_invariants=False)
        group.allreduce([sparse]).wait()
    group.barrier().wait()
    group.monitored_barrier()
    sent = group.send([x], (rank + 1) % n, 3)
    group.recv([outputs[0]], (rank - 1) % n, 3).wait()
    sent.wait()


@each_transport
def test_a_default_device_of_the_program(transport: str) -> None:
    store = dist.HashStore()

    def run(rank: int) -> None:
        with torch.device("meta"):
            options = Options(timedelta(seconds=30), transport, hostname="127.0.0.1")
            group = ProcessGroupGloo(store, rank, 2, options=options)
            for numel in (SMALL, LARGE):
                everything(group, numel)
            group.shutdown()

    on_threads(2, run)


@each_transport
def test_inference_mode_ends_with_the_call(transport: str) -> None:
    def run(group: ProcessGroupGloo) -> None:
        for numel in (SMALL, LARGE):
            with torch.inference_mode():
                everything(group, numel)
            everything(group, numel)

    in_groups(2, run, transport=transport)


@each_transport
def test_inference_tensors_get_results_after_their_mode_has_ended(transport: str) -> None:
    def run(group: ProcessGroupGloo) -> None:
        with torch.inference_mode():
            plain, columns = filled(group.rank(), 4), filled(group.rank(), 4).view(2, 2).t()
            sparse = columns.to_sparse()
            works = [group.allreduce([x]) for x in (plain, columns, sparse)]
        for work in works:
            work.wait()
        assert {x.sum().item() for x in (plain, columns, sparse)} == {12.0}

    in_groups(2, run, transport=transport)


@pytest.mark.parametrize("is_staged", [False, True], ids=["host", "staged"])
def test_tensors_of_outside_get_results_in_inference_mode(is_staged: bool) -> None:
    """The memory that is lent for them is made in that mode, and written to by the worker."""

    def run(group: ProcessGroupGloo) -> None:
        columns, outputs = filled(group.rank(), 4).view(2, 2).t(), [filled(9, 4) for _ in range(2)]
        with torch.inference_mode():
            works = [
                group.allreduce([columns]),
                group.allgather([outputs], [filled(group.rank(), 4)]),
            ]
        for work in works:
            while not work.is_completed():  # so that the worker does it, not who waits
                time.sleep(0.001)
            work.wait()
        assert columns.unique().tolist() == [3.0]
        assert [output.unique().tolist() for output in outputs] == [[1.0], [2.0]]

    with substituted_handle(HostAsDevice()) if is_staged else contextlib.nullcontext():
        in_groups(2, run)


class HostAsDevice(HostHandle):
    """Tensors of the host are staged as if they were on a device whose copies take no time."""

    has_streams = True


def _factory_calls(path: Path) -> Iterator[str]:
    names: set[str] = {f.__name__ for f in _device_constructors()}
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id="torch"), attr=attr), keywords=given
            ):
                if attr in names and all(keyword.arg != "device" for keyword in given):
                    yield f"{path.name}:{node.lineno} torch.{attr}"


@pytest.mark.parametrize("part", ["gloo", "transport", "ddp", "fsdp", "sync_batchnorm"])
def test_every_new_tensor_names_its_device(part: str) -> None:
    sources = sorted((Path(impl.__path__[0]) / part).rglob("*.py"))
    assert sources
    assert [call for path in sources for call in _factory_calls(path)] == []

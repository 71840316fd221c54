"""The floor of a collective between ranks of one host: what it costs if no rank waits for another.

Each rank calls torch.distributed with a group in Python that does nothing, and then moves its
share of the bytes, each once, by an algorithm that moves as few as any. It reads them where they
lie: all ranks have all inputs mapped. Ranks that share a processor hand it over once a call, since
each needs what the others bring.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from conformance.bench.plan import Point
from conformance.harness.me import Me

OPERATIONS = (
    *("all_reduce", "broadcast", "all_gather_into_tensor"),
    *("reduce_scatter_tensor", "all_to_all_single"),
)
_BACKEND = "conformance_floor"
_METHODS = (
    *("allreduce", "broadcast", "all_gather_single", "_allgather_base"),
    *("all_to_all_single", "alltoall_base", "reduce_scatter_single", "_reduce_scatter_base"),
)  # each by its names in torch 2.11 and 2.13
_ONE_STEP_NBYTES = 16 * 1024  # up to here, adding whole tensors beats adding and gathering chunks
_CACHED_NBYTES = 1024 * 1024  # up to here, processors hold all tensors of a call in their caches


class _Done(dist.Work):
    def wait(self, timeout: Any = None) -> bool:
        return True


class _IdleGroup(dist.ProcessGroup):
    """Every call returns at once."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # torch's stub lacks this form
        self._name = ""
        done = _Done()
        for method in _METHODS:
            setattr(self, method, lambda *arguments: done)

    def getBackendName(self) -> str:
        return _BACKEND

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:
        return self._name

    def setGroupDesc(self, desc: str) -> None:
        pass


def make_group() -> Any:
    """A group of all ranks that does nothing."""
    if not hasattr(dist.Backend, _BACKEND.upper()):
        dist.Backend.register_backend(_BACKEND, _IdleGroup, devices=["cpu"])
    return dist.new_group(backend=_BACKEND)


def map_inputs(me: Me, numel: int) -> list[Tensor]:
    """By rank, `numel` float32 elements that all ranks have mapped."""
    paths = [""]
    if me.rank == 0:
        file = os.memfd_create("inputs")  # not in /dev/shm, which may be small
        paths = [f"/proc/{os.getpid()}/fd/{file}"]
    dist.broadcast_object_list(paths)
    whole = torch.from_file(paths[0], shared=True, size=me.world_size * numel)
    dist.barrier()
    if me.rank == 0:
        os.close(file)
    return list(whole.split(numel))


def prepare(
    point: Point, rank: int, inputs: Sequence[Tensor], call: Callable[[], Any]
) -> tuple[Callable[[], Any], list[Tensor]]:
    """What a rank does for one collective, and the tensors that are written anew before a round.

    inputs: by rank, at least two, each at least as large as the point's tensors. They change.
    call: the one to the group that does nothing.
    """
    move, tensors = _share(point, rank, inputs)
    is_crowded = len(inputs) > len(os.sched_getaffinity(0))

    def work() -> None:
        call()
        move()
        if is_crowded:
            os.sched_yield()

    return work, tensors


def _share(
    point: Point, rank: int, inputs: Sequence[Tensor]
) -> tuple[Callable[[], Any], list[Tensor]]:
    """What a rank has to move, and the tensors that it reads and writes of its own."""
    size, numel = len(inputs), point.numel
    order = [(rank + step) % size for step in range(size)]  # so that not all read from one at once
    chunk = numel // size
    parts = [slice(r * chunk, (r + 1) * chunk) for r in range(size)]
    mine = inputs[rank][:numel]
    match point.operation:
        case "all_reduce":
            # In a cache, memory of one's own costs less than reading what another has just written.
            output = torch.empty(numel) if point.nbytes <= _CACHED_NBYTES else mine
            if point.nbytes <= _ONE_STEP_NBYTES:
                wholes = [inputs[r][:numel] for r in order[1:]]
                return lambda: _add(output, mine, wholes), [mine, output]
            target, first = output[parts[rank]], mine[parts[rank]]
            chunks = [inputs[r][parts[rank]] for r in order[1:]]
            copies = [(output[parts[r]], inputs[r][parts[r]]) for r in order[1:]]

            def reduce_and_gather() -> None:
                _add(target, first, chunks)
                _copy(copies)

            return reduce_and_gather, [mine, output]
        case "broadcast":
            copies = [(mine, inputs[0][:numel])] if rank else []
            return lambda: _copy(copies), [mine]
        case "all_gather_into_tensor":
            output = torch.empty(numel)
            copies = [(output[parts[r]], inputs[r][:chunk]) for r in order]
            return lambda: _copy(copies), [inputs[rank][:chunk], output]
        case "all_to_all_single":
            output = torch.empty(numel)
            copies = [(output[parts[r]], inputs[r][parts[rank]]) for r in order]
            return lambda: _copy(copies), [mine, output]
        case "reduce_scatter_tensor":
            output = torch.empty(chunk)
            first, *others = [inputs[r][parts[rank]] for r in order]
            return lambda: _add(output, first, others), [mine, output]
    raise ValueError(f"{point.operation} has no floor")


def _add(output: Tensor, first: Tensor, others: Sequence[Tensor]) -> None:
    torch.add(first, others[0], out=output)
    for other in others[1:]:
        output.add_(other)


def _copy(copies: Sequence[tuple[Tensor, Tensor]]) -> None:
    for output, given in copies:
        output.copy_(given)

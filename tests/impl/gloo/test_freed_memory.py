"""A tensor's memory is freed while an operation uses it: an error, and no access to the memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import ReduceOp, Work

from impl import errors
from impl.gloo import ProcessGroupGloo
from tests.impl.gloo.ranks import in_groups

SMALL, LARGE = 4, 300_000  # elements; the large ones do not fit into a ring or an eager message
NUMELS = pytest.mark.parametrize("numel", [SMALL, LARGE])
TRANSPORTS = pytest.mark.parametrize("transport", ["shm", "tcp", "gloo"])


def free(tensor: Tensor) -> None:
    tensor.untyped_storage().resize_(0)


def in_turn(
    transport: str,
    first: Callable[[ProcessGroupGloo], None],
    then: Callable[[ProcessGroupGloo], None],
    end: Callable[[ProcessGroupGloo], None] = lambda group: None,
) -> None:
    """Rank 0 calls `first`, then rank 1 `then`, then rank 0 `end`."""
    turn = threading.Event()

    def run(group: ProcessGroupGloo) -> None:
        if group.rank() == 0:
            try:
                first(group)
            finally:
                turn.set()
            end(group)
        else:
            turn.wait()
            then(group)

    in_groups(2, run, transport=transport)


@TRANSPORTS
@NUMELS
@pytest.mark.parametrize("strided", [False, True], ids=["dense", "strided"])
def test_a_receive_fails_alone(transport: str, numel: int, strided: bool) -> None:
    freed = torch.zeros(numel, 2)[:, 0] if strided else torch.zeros(numel)
    kept = torch.zeros(numel)
    works = []

    def first(group: ProcessGroupGloo) -> None:
        works.extend([group.recv([freed], 1, 7), group.recv([kept], 1, 7)])
        free(freed)

    def then(group: ProcessGroupGloo) -> None:
        for value in (1.0, 2.0):
            group.send([torch.full((numel,), value)], 0, 7).wait()

    def end(group: ProcessGroupGloo) -> None:
        with pytest.raises(errors.Aborted, match="recv on group 'g', rank 0 of 2: the storage"):
            works[0].wait()
        works[1].wait()
        assert kept.eq(2.0).all()

    in_turn(transport, first, then, end)


@TRANSPORTS
def test_a_message_that_cannot_be_sent_ends_the_group(transport: str) -> None:
    freed = torch.ones(30 * LARGE)
    works = []

    def first(group: ProcessGroupGloo) -> None:
        works.append(group.send([freed], 1, 0))
        free(freed)

    def then(group: ProcessGroupGloo) -> None:
        with pytest.raises(errors.CommunicationError):
            group.recv([torch.zeros(30 * LARGE)], 0, 0).wait()

    def end(group: ProcessGroupGloo) -> None:
        with pytest.raises(
            errors.Aborted, match=r"send .*rank 0.* cannot send to rank 1: the stor"
        ):
            works[0].wait()

    in_turn(transport, first, then, end)


Call = Callable[[ProcessGroupGloo, Tensor], Work]  # with an even number of elements
COLLECTIVES: dict[str, Call] = {
    "all_reduce": lambda group, x: group.allreduce([x]),
    "all_reduce-avg": lambda group, x: group.allreduce([x], ReduceOp.AVG),
    "all_reduce-strided": lambda group, x: group.allreduce([x.view(2, -1).T]),
    "allreduce_coalesced": lambda group, x: group.allreduce_coalesced([x, torch.ones(2)]),
    "reduce": lambda group, x: group.reduce([x], root=0),
    "broadcast-root": lambda group, x: group.broadcast([x], root=0),
    "broadcast": lambda group, x: group.broadcast([x], root=1),
    "all_gather": lambda group, x: group.allgather([[x, torch.ones_like(x)]], [torch.ones_like(x)]),
    "all_gather-input": lambda group, x: group.allgather([[x + 1, x + 2]], [x]),
    "all_gather_into_tensor": lambda group, x: group._allgather_base(x, x[: len(x) // 2] + 1),
    "gather": lambda group, x: group.gather([[x + 1, x]], [x + 2], root=0),
    "scatter": lambda group, x: group.scatter([x], [[x + 1, x + 2]], root=0),
    "reduce_scatter": lambda group, x: group.reduce_scatter([x], [[x + 1, x + 2]]),
    "reduce_scatter_tensor": lambda group, x: group._reduce_scatter_base(x[: len(x) // 2] + 1, x),
    "all_to_all": lambda group, x: group.alltoall([x, x + 1], [x + 2, x + 3]),
    "all_to_all_single": lambda group, x: group.alltoall_base(x, x + 1, [], []),
}


# What is read, or what the rank gives to itself, may be through when the memory goes.
ONLY_READ = ("all_gather-input", "reduce_scatter_tensor", "scatter")


def waits_for_rank_1(group: ProcessGroupGloo) -> bool:
    """Whether a collective has come to where it waits: until then it copies its own part, and what
    frees memory in the middle of a copy cannot be seen."""
    comm: Any = group._comm
    if comm.kind == "shm":
        return bool(comm._slots.rounds.step)
    runs_on: int = group._executor._busy_thread
    loop = comm._loop
    return bool(comm._group._call and loop._is_polled and loop._driver == runs_on)


def call_of_rank_1(name: str, group: ProcessGroupGloo, x: Tensor) -> Work:
    if name == "gather":
        return group.gather([], [x], root=0)
    if name == "scatter":
        return group.scatter([x], [], root=0)
    return COLLECTIVES[name](group, x)


@TRANSPORTS
@NUMELS
@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_collective_raises_and_later_ones_work_or_raise(
    transport: str, numel: int, name: str
) -> None:
    freed = torch.ones(numel)
    works = []

    def first(group: ProcessGroupGloo) -> None:
        works.append(COLLECTIVES[name](group, freed))
        while not (waits_for_rank_1(group) or works[0].is_completed()):
            time.sleep(0.001)
        free(freed)

    def later(group: ProcessGroupGloo) -> bool:
        try:
            group.barrier().wait()
        except errors.CommunicationError:
            return False
        return True

    def then(group: ProcessGroupGloo) -> None:
        try:
            call_of_rank_1(name, group, torch.ones(numel)).wait()
        except errors.CommunicationError:
            later(group)
            return
        went_on.append(later(group))

    def end(group: ProcessGroupGloo) -> None:
        says = rf"{name.split('-')[0]}.* rank 0 of 2: .*the stor"
        may_succeed = name in ONLY_READ
        with suppress(errors.Aborted) if may_succeed else pytest.raises(errors.Aborted, match=says):
            works[0].wait()
        went_on.append(later(group))

    went_on: list[bool] = []
    in_turn(transport, first, then, end)

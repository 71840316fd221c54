"""Inputs that share memory with outputs: the result is as if they did not, on every transport."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from impl.gloo import ProcessGroupGloo
from tests.impl.gloo.ranks import in_groups

# on TCP, tensors of more than 64 KiB are worked on where they lie
NUMELS = (6, 400_002)
on_transports = pytest.mark.parametrize("transport", ["shm", "tcp", "gloo"])


def of_rank(rank: int, numel: int) -> Tensor:
    return torch.arange(numel, dtype=torch.float32) % 1000 + 10_000 * rank


def starts(rank: int, numel: int) -> tuple[int, int, int]:
    """Where a part may begin: in its own place, in rank 0's, across two."""
    return rank * numel, 0, numel // 2


@on_transports
def test_reduce_scatter_into_the_input(transport: str) -> None:
    def run(group: ProcessGroupGloo) -> None:
        rank, n = group.rank(), group.size()
        for numel in NUMELS:
            want = torch.stack([of_rank(r, n * numel) for r in range(n)]).sum(0).view(n, numel)
            for start in starts(rank, numel):
                whole = of_rank(rank, n * numel)
                output = whole[start : start + numel]
                group.reduce_scatter_single(output, whole).wait()
                assert torch.equal(output, want[rank])
                given = of_rank(rank, n * numel)
                assert torch.equal(whole[:start], given[:start])
                assert torch.equal(whole[start + numel :], given[start + numel :])

    in_groups(3, run, transport=transport)


@on_transports
def test_all_gather_from_the_output(transport: str) -> None:
    def run(group: ProcessGroupGloo) -> None:
        rank, n = group.rank(), group.size()
        for numel in NUMELS:
            want = torch.cat([of_rank(r, numel) for r in range(n)])
            for start in starts(rank, numel):
                whole = torch.zeros(n * numel)
                given = whole[start : start + numel].copy_(of_rank(rank, numel))
                group.all_gather_single(whole, given).wait()
                assert torch.equal(whole, want)
                whole.zero_()
                given.copy_(of_rank(rank, numel))
                group.allgather([list(whole.view(n, numel))], [given]).wait()
                assert torch.equal(whole, want)

    in_groups(3, run, transport=transport)


@on_transports
def test_a_root_that_uses_one_memory(transport: str) -> None:
    def run(group: ProcessGroupGloo) -> None:
        rank, n = group.rank(), group.size()
        for numel in NUMELS:
            for place in range(n):
                rows = torch.zeros(n, numel)
                own = rows[place].copy_(of_rank(rank, numel))
                lists = [list(rows)] if rank == 1 else []
                group.gather(lists, [own], root=1).wait()
                if rank == 1:
                    assert torch.equal(rows, torch.stack([of_rank(r, numel) for r in range(n)]))
                group.scatter([own], lists, root=1).wait()
                assert torch.equal(own, of_rank(rank, numel))

    in_groups(3, run, transport=transport)


@on_transports
def test_an_input_that_is_the_output_of_another_one(transport: str) -> None:
    def run(group: ProcessGroupGloo) -> None:
        rank, n = group.rank(), group.size()
        for numel in NUMELS:
            whole = [of_rank(rank + i, n * numel) for i in (0, 1)]
            outputs = [whole[1][:numel], whole[0][:numel]]
            group.reduce_scatter_single_coalesced(outputs, whole).wait()
            for i, output in enumerate(outputs):
                total = torch.stack([of_rank(r + i, n * numel) for r in range(n)]).sum(0)
                assert torch.equal(output, total[rank * numel : (rank + 1) * numel])

    in_groups(2, run, transport=transport)

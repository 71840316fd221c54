"""all_to_all and all_to_all_single: results with even and uneven splits, and types of splits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from conformance import Chapter, Me, Ranks, assert_each_rank, world_sizes
from conformance.oracle.data import sample
from conformance.spec.collectives.contributions import mine, of

chapter = Chapter("collectives", source="torch 2.13 docs, all_to_all", needs="op:all_to_all_single")


def exchanged(me: Me) -> list[Tensor]:
    outputs = [torch.full_like(mine(me), -1.0) for _ in range(me.world_size)]
    dist.all_to_all(outputs, [mine(me, salt=to) for to in range(me.world_size)])
    return outputs


@chapter.must(
    "all_to_all/values",
    "all_to_all puts the j-th tensor of rank i's input list into the i-th tensor of rank j's "
    "output list.",
    needs="op:all_to_all",
)
@world_sizes(1, 2, 3, 5, at_least=1)
def test_all_to_all_transposes(ranks: Ranks) -> None:
    n = ranks.world_size
    want = [[of(source, salt=rank) for source in range(n)] for rank in range(n)]
    assert_each_rank(ranks.run(exchanged), want)


def rows(source: int, destination: int) -> int:
    """How many rows go from one to the other: all different, and some none."""
    return (2 * source + destination) % 4


def exchanged_uneven(me: Me) -> list[Tensor]:
    def part(source: int, destination: int) -> Tensor:
        return sample((rows(source, destination), 2), "float32", source, destination).to(me.device)

    everyone = range(me.world_size)
    outputs = [torch.full_like(part(source, me.rank), -1.0) for source in everyone]
    dist.all_to_all(outputs, [part(me.rank, destination) for destination in everyone])
    return outputs


@chapter.must(
    "all_to_all/uneven",
    "all_to_all takes tensors of a different size for each pair of ranks, including tensors "
    "without elements.",
    needs="op:all_to_all",
    rests_on="all_to_all/values",
)
@world_sizes(2, 3, 5, at_least=2)
def test_all_to_all_of_uneven_tensors(ranks: Ranks) -> None:
    n = ranks.world_size
    want = [
        [sample((rows(source, rank), 2), "float32", source, rank) for source in range(n)]
        for rank in range(n)
    ]
    assert_each_rank(ranks.run(exchanged_uneven), want)


def exchanged_single(me: Me) -> Tensor:
    parts = torch.cat([mine(me, salt=to) for to in range(me.world_size)])
    output = torch.full_like(parts, -1.0)
    dist.all_to_all_single(output, parts)
    return output


@chapter.must(
    "all_to_all_single/even",
    "all_to_all_single splits its input along the first dimension into one part for each rank, "
    "and concatenates the parts that it receives in the order of the ranks.",
    source="torch 2.13 docs, all_to_all_single",
)
@world_sizes(1, 2, 3, 5, at_least=1)
def test_all_to_all_single_transposes_blocks(ranks: Ranks) -> None:
    n = ranks.world_size
    want = [torch.cat([of(source, salt=rank) for source in range(n)]) for rank in range(n)]
    assert_each_rank(ranks.run(exchanged_single), want)


AS_SPLITS: dict[str, Callable[[list[int]], Any]] = {
    "list": list,
    "tuple": tuple,
    "array": np.array,
    "integers of numpy": lambda splits: list(np.array(splits)),
    "tensors": lambda splits: list(torch.tensor(splits)),
}


def exchanged_splits(me: Me, table: list[list[int]], kind: str = "list") -> Tensor:
    """Row r of the table: how many rows rank r sends to each rank."""
    sent = table[me.rank]
    received = [row[me.rank] for row in table]
    output = torch.full((sum(received), 2), -1.0, device=me.device)
    rows_of_mine = sample((sum(sent), 2), "float32", me.rank).to(me.device)
    as_splits = AS_SPLITS[kind]
    dist.all_to_all_single(output, rows_of_mine, as_splits(received), as_splits(sent))
    return output


def blocks(source: int, table: list[list[int]]) -> tuple[Tensor, ...]:
    """What rank `source` sends to each rank."""
    return torch.split(sample((sum(table[source]), 2), "float32", source), table[source])


TABLES = [
    pytest.param([[1, 3, 2], [2, 1, 3], [3, 2, 1]], id="rotated"),
    pytest.param([[3, 2, 1], [2, 2, 2], [1, 2, 3]], id="transposed"),
    pytest.param([[0, 4, 1], [2, 0, 0], [0, 0, 3]], id="with-zeros"),
    pytest.param([[0, 0, 0], [0, 0, 0], [5, 0, 0]], id="one-block"),
    pytest.param([[1, 3, 2], [1, 3, 2], [1, 3, 2]], id="by-receiver"),
]


@chapter.must(
    "all_to_all_single/uneven",
    "all_to_all_single with split sizes sends input_split_sizes[j] rows to rank j and takes "
    "output_split_sizes[i] rows from rank i, zero rows included.",
    source="torch 2.13 docs, all_to_all_single; pytorch#177381, pytorch#190311",
    rests_on="all_to_all_single/even",
)
@world_sizes(3)
@pytest.mark.parametrize("table", TABLES)
def test_all_to_all_single_with_splits(ranks: Ranks, table: list[list[int]]) -> None:
    got = ranks.run(exchanged_splits, table)
    want = [torch.cat([blocks(source, table)[rank] for source in range(3)]) for rank in range(3)]
    assert_each_rank(got, want)


@chapter.must(
    "all_to_all_single/split-types",
    "all_to_all_single takes split sizes as a list, a tuple or a numpy array of integers of any "
    "type, including zero-dimensional tensors.",
    source="torch 2.13, ProcessGroup.all_to_all_single: 'Sequence[SupportsInt | SupportsIndex]'",
    rests_on="all_to_all_single/uneven",
)
@world_sizes(2)
@pytest.mark.parametrize("kind", [kind for kind in AS_SPLITS if kind != "list"])
def test_all_to_all_single_takes_integers_of_any_type(ranks: Ranks, kind: str) -> None:
    table = [[1, 3], [0, 2]]
    got = ranks.run(exchanged_splits, table, kind)
    want = [torch.cat([blocks(source, table)[rank] for source in range(2)]) for rank in range(2)]
    assert_each_rank(got, want)


def exchanged_one_sided(me: Me, given: str) -> Tensor:
    """Splits that say the same as their absence, on one side or on none."""
    parts = torch.cat([mine(me, salt=to) for to in range(me.world_size)])
    output = torch.full_like(parts, -1.0)
    even = [2] * me.world_size
    match given:
        case "output":
            dist.all_to_all_single(output, parts, even, None)
        case "input":
            dist.all_to_all_single(output, parts, [], even)
        case _:
            dist.all_to_all_single(output, parts, [], [])
    return output


@chapter.must(
    "all_to_all_single/one-sided-splits",
    "all_to_all_single splits evenly on a side whose split sizes are None or an empty list.",
    source="torch 2.13 docs, all_to_all_single: 'if specified None or empty'",
    rests_on="all_to_all_single/uneven",
)
@world_sizes(1, 3)
@pytest.mark.parametrize("given", ["output", "input", "neither"])
def test_all_to_all_single_splits_evenly_where_nothing_is_said(ranks: Ranks, given: str) -> None:
    n = ranks.world_size
    want = [torch.cat([of(source, salt=rank) for source in range(n)]) for rank in range(n)]
    assert_each_rank(ranks.run(exchanged_one_sided, given), want)

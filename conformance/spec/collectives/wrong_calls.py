"""Invalid calls of collectives, a function for each: wrong types, dtypes, roots, lists and splits.

`Any` where the type of an argument is what is wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from conformance import Me
from conformance.capabilities import OPS
from conformance.spec.collectives.perform import all_gather_into_tensor, reduce_scatter_tensor


class Kit:
    """The tensors that wrong calls are made of."""

    def __init__(self, me: Me) -> None:
        self.n = me.world_size
        self.rank = me.rank
        self.device = me.device

    def x(self, numel: int = 4, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.ones(numel, dtype=dtype, device=self.device)

    def xs(
        self, count: int | None = None, numel: int = 4, dtype: torch.dtype = torch.float32
    ) -> list[Tensor]:
        """A list of so many tensors; one for each rank by default."""
        return [self.x(numel, dtype) for _ in range(self.n if count is None else count)]


_SHORT = {"into_tensor": "all_gather_into_tensor", "splits": "all_to_all_single"}


def operation_of(call: Callable[[Kit], None]) -> str:
    """The operation that it calls: its name begins with it."""
    named = {**{op: op for op in OPS}, **_SHORT}
    return named[max((name for name in named if call.__name__.startswith(name)), key=len)]


def all_reduce_of_a_list(k: Kit) -> None:
    wrong: Any = [k.x()]
    dist.all_reduce(wrong)


def broadcast_of_a_list(k: Kit) -> None:
    wrong: Any = [k.x()]
    dist.broadcast(wrong, 0)


def reduce_of_a_number(k: Kit) -> None:
    wrong: Any = 3.0
    dist.reduce(wrong, 0)


def all_gather_into_no_list(k: Kit) -> None:
    wrong: Any = k.x()
    dist.all_gather(wrong, k.x())


def all_gather_into_a_tuple(k: Kit) -> None:
    wrong: Any = tuple(k.xs())
    dist.all_gather(wrong, k.x())


def all_gather_into_numbers(k: Kit) -> None:
    wrong: Any = [1] * k.n
    dist.all_gather(wrong, k.x())


def into_tensor_of_a_list(k: Kit) -> None:
    all_gather_into_tensor(k.xs(), k.x())


def gather_into_no_list(k: Kit) -> None:
    wrong: Any = tuple(k.xs())
    dist.gather(k.x(), wrong, 0)


def scatter_of_no_list(k: Kit) -> None:
    wrong: Any = (k.x(),)
    dist.scatter(k.x(), wrong, 0)


def reduce_scatter_of_no_list(k: Kit) -> None:
    wrong: Any = k.x()
    dist.reduce_scatter(k.x(), wrong)


def reduce_scatter_tensor_of_a_list(k: Kit) -> None:
    reduce_scatter_tensor(k.x(), k.xs())


def all_to_all_of_no_list(k: Kit) -> None:
    wrong: Any = (k.x(),) * k.n
    dist.all_to_all(k.xs(), wrong)


def all_to_all_single_of_a_list(k: Kit) -> None:
    wrong: Any = k.xs()
    dist.all_to_all_single(k.x(), wrong)


NOT_TENSORS = [
    all_reduce_of_a_list,
    broadcast_of_a_list,
    reduce_of_a_number,
    all_gather_into_no_list,
    all_gather_into_a_tuple,
    all_gather_into_numbers,
    into_tensor_of_a_list,
    gather_into_no_list,
    scatter_of_no_list,
    reduce_scatter_of_no_list,
    reduce_scatter_tensor_of_a_list,
    all_to_all_of_no_list,
    all_to_all_single_of_a_list,
]


def all_gather_of_half(k: Kit) -> None:
    dist.all_gather(k.xs(), k.x(dtype=torch.float16))


def all_gather_into_half_once(k: Kit) -> None:
    dist.all_gather([*k.xs(k.n - 1), k.x(dtype=torch.float16)], k.x())


def gather_of_half(k: Kit) -> None:
    dist.gather(k.x(dtype=torch.float16), k.xs(), 0)


def scatter_of_half(k: Kit) -> None:
    dist.scatter(k.x(), k.xs(dtype=torch.float16), 0)


def reduce_scatter_of_half(k: Kit) -> None:
    dist.reduce_scatter(k.x(), k.xs(dtype=torch.float16))


def all_to_all_of_half(k: Kit) -> None:
    dist.all_to_all(k.xs(), k.xs(dtype=torch.float16))


def all_to_all_single_of_half(k: Kit) -> None:
    dist.all_to_all_single(k.x(4 * k.n), k.x(4 * k.n, torch.float16))


MIXED = [
    all_gather_of_half,
    all_gather_into_half_once,
    gather_of_half,
    scatter_of_half,
    reduce_scatter_of_half,
    all_to_all_of_half,
    all_to_all_single_of_half,
]


def broadcast_from_nobody(k: Kit) -> None:
    dist.broadcast(k.x())


def broadcast_from_two(k: Kit) -> None:
    dist.broadcast(k.x(), 0, group_src=0)


def reduce_to_nobody(k: Kit) -> None:
    dist.reduce(k.x())


def reduce_to_two(k: Kit) -> None:
    dist.reduce(k.x(), 0, group_dst=0)


def gather_to_two(k: Kit) -> None:
    dist.gather(k.x(), None, dst=0, group_dst=0)


def scatter_from_two(k: Kit) -> None:
    dist.scatter(k.x(), None, src=0, group_src=0)


ROOTS = [
    broadcast_from_nobody,
    broadcast_from_two,
    reduce_to_nobody,
    reduce_to_two,
    gather_to_two,
    scatter_from_two,
]


def broadcast_from_outside(k: Kit) -> None:
    dist.broadcast(k.x(), k.n)


def broadcast_from_below(k: Kit) -> None:
    dist.broadcast(k.x(), -1)


def broadcast_from_outside_of_the_group(k: Kit) -> None:
    dist.broadcast(k.x(), group_src=k.n)


def reduce_to_outside(k: Kit) -> None:
    dist.reduce(k.x(), group_dst=k.n)


def gather_to_outside(k: Kit) -> None:
    dist.gather(k.x(), None, group_dst=k.n)


def scatter_from_outside(k: Kit) -> None:
    dist.scatter(k.x(), None, group_src=k.n)


OUTSIDE = [
    broadcast_from_outside,
    broadcast_from_below,
    broadcast_from_outside_of_the_group,
    reduce_to_outside,
    gather_to_outside,
    scatter_from_outside,
]


def all_gather_into_too_few(k: Kit) -> None:
    dist.all_gather(k.xs(k.n - 1), k.x())


def all_gather_into_too_many(k: Kit) -> None:
    dist.all_gather(k.xs(k.n + 1), k.x())


def all_gather_into_nothing(k: Kit) -> None:
    dist.all_gather([], k.x())


def all_gather_into_longer_ones(k: Kit) -> None:
    dist.all_gather(k.xs(numel=5), k.x())


ALL_GATHER = [
    all_gather_into_too_few,
    all_gather_into_too_many,
    all_gather_into_nothing,
    all_gather_into_longer_ones,
]


def into_tensor_too_long(k: Kit) -> None:
    all_gather_into_tensor(k.x(4 * k.n + 1), k.x())


def into_tensor_too_short(k: Kit) -> None:
    all_gather_into_tensor(k.x(4 * k.n - 1), k.x())


def into_tensor_of_doubles(k: Kit) -> None:
    all_gather_into_tensor(k.x(4 * k.n, torch.float64), k.x())


INTO_TENSOR = [into_tensor_too_long, into_tensor_too_short, into_tensor_of_doubles]


def gather_without_a_list(k: Kit) -> None:
    dist.gather(k.x(), None, k.rank)


def gather_with_a_list_too_many(k: Kit) -> None:
    dist.gather(k.x(), k.xs(), (k.rank + 1) % k.n)


def gather_into_too_many(k: Kit) -> None:
    dist.gather(k.x(), k.xs(k.n + 1), k.rank)


def gather_into_longer_ones(k: Kit) -> None:
    dist.gather(k.x(), k.xs(numel=5), k.rank)


GATHER = [
    gather_without_a_list,
    gather_with_a_list_too_many,
    gather_into_too_many,
    gather_into_longer_ones,
]


def scatter_without_a_list(k: Kit) -> None:
    dist.scatter(k.x(), None, k.rank)


def scatter_with_a_list_too_many(k: Kit) -> None:
    dist.scatter(k.x(), k.xs(), (k.rank + 1) % k.n)


def scatter_of_too_many(k: Kit) -> None:
    dist.scatter(k.x(), k.xs(k.n + 1), k.rank)


def scatter_of_longer_ones(k: Kit) -> None:
    dist.scatter(k.x(), k.xs(numel=5), k.rank)


SCATTER = [
    scatter_without_a_list,
    scatter_with_a_list_too_many,
    scatter_of_too_many,
    scatter_of_longer_ones,
]


def reduce_scatter_of_too_few(k: Kit) -> None:
    dist.reduce_scatter(k.x(), k.xs(k.n - 1))


def reduce_scatter_of_too_many(k: Kit) -> None:
    dist.reduce_scatter(k.x(), k.xs(k.n + 1))


def reduce_scatter_of_longer_ones(k: Kit) -> None:
    dist.reduce_scatter(k.x(), k.xs(numel=5))


REDUCE_SCATTER = [
    reduce_scatter_of_too_few,
    reduce_scatter_of_too_many,
    reduce_scatter_of_longer_ones,
]


def reduce_scatter_tensor_too_long(k: Kit) -> None:
    reduce_scatter_tensor(k.x(), k.x(4 * k.n + 1))


def reduce_scatter_tensor_too_short(k: Kit) -> None:
    reduce_scatter_tensor(k.x(), k.x(4 * k.n - 1))


def reduce_scatter_tensor_of_doubles(k: Kit) -> None:
    reduce_scatter_tensor(k.x(), k.x(4 * k.n, torch.float64))


SCATTER_TENSOR = [
    reduce_scatter_tensor_too_long,
    reduce_scatter_tensor_too_short,
    reduce_scatter_tensor_of_doubles,
]


def all_to_all_of_too_few(k: Kit) -> None:
    dist.all_to_all(k.xs(k.n - 1), k.xs(k.n - 1))


def all_to_all_of_too_many(k: Kit) -> None:
    dist.all_to_all(k.xs(), k.xs(k.n + 1))


ALL_TO_ALL = [all_to_all_of_too_few, all_to_all_of_too_many]


def splits_of_too_few_rows(k: Kit) -> None:
    dist.all_to_all_single(k.x(2 * k.n), k.x(2 * k.n), [2] * k.n, [2] * (k.n - 1) + [1])


def splits_into_too_few_rows(k: Kit) -> None:
    dist.all_to_all_single(k.x(2 * k.n), k.x(2 * k.n), [2] * (k.n - 1) + [1], [2] * k.n)


def splits_for_too_many_ranks(k: Kit) -> None:
    dist.all_to_all_single(k.x(2 * k.n), k.x(2 * k.n), [2] * k.n, [2] * k.n + [0])


SPLITS = [splits_of_too_few_rows, splits_into_too_few_rows, splits_for_too_many_ranks]


def reduce_scatter_into_shorter_ones(k: Kit) -> None:
    dist.reduce_scatter(k.x(), [k.x(5 + rank) for rank in range(k.n)])


def all_to_all_single_of_odd_rows(k: Kit) -> None:
    dist.all_to_all_single(k.x(2 * k.n + 1), k.x(2 * k.n + 1))

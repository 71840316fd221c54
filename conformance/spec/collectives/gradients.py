"""Autograd through each functional collective and each one of torch.distributed.nn.functional.

Each rank weighs the elements of its result by numbers of its own, so its loss has these weights for
a gradient, and what arrives at an input says which ranks' weights came back to it, and to where.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as nn
from torch import Tensor

from conformance import Chapter, Me, Ranks, assert_each_rank, assert_that, not_probed, world_sizes
from conformance.oracle.data import sample
from conformance.spec.collectives.perform import everyone

SOURCE = "torch 2.13, torch.distributed._functional_collectives"
NN = "torch 2.13, torch.distributed.nn.functional"

chapter = Chapter("collectives", source=NN)


def weights(rank: int, shape: Sequence[int]) -> Tensor:
    """By what this rank multiplies its result."""
    return sample(shape, "float32", rank, salt=3) + rank


def gradient(me: Me, shape: tuple[int, ...], call: Callable[[Tensor], Any]) -> Tensor:
    """What comes back to this rank's input of that shape."""
    x = sample(shape, "float32", me.rank).to(me.device).requires_grad_()
    result = call(x)
    if not isinstance(result, Tensor):
        result = torch.stack(list(result))
    (result * weights(me.rank, result.shape).to(me.device)).sum().backward()
    assert x.grad is not None
    return x.grad


@contextlib.contextmanager
def deprecated_names() -> Iterator[None]:
    """torch 2.13 warns of most names in torch.distributed.nn."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield


ROW = (4,)


def through_functional_all_reduce(me: Me) -> Tensor:
    return gradient(me, ROW, lambda x: functional.all_reduce(x, "sum", everyone()))


def through_nn_all_reduce(me: Me) -> Tensor:
    with deprecated_names():
        return gradient(me, ROW, nn.all_reduce)


def check_sum_of_weights(ranks: Ranks, function: Callable[[Me], Tensor]) -> None:
    n = ranks.world_size
    want = torch.stack([weights(rank, ROW) for rank in range(n)]).sum(0)
    assert_each_rank(ranks.run(function), [want] * n)


@chapter.must(
    "functional/all_reduce-gradient",
    "The gradient of the functional all_reduce by sum is the sum of all ranks' gradients.",
    source=f"{SOURCE}, all_reduce_backward",
    rests_on="functional/all_reduce",
)
@world_sizes(1, 2, 3)
def test_functional_all_reduce(ranks: Ranks) -> None:
    check_sum_of_weights(ranks, through_functional_all_reduce)


@chapter.must(
    "autograd/all_reduce",
    "nn.functional.all_reduce by SUM differentiates to the sum of all ranks' gradients.",
    rests_on="all_reduce/sum",
)
@world_sizes(1, 2, 3)
def test_all_reduce(ranks: Ranks) -> None:
    check_sum_of_weights(ranks, through_nn_all_reduce)


def through_functional_average(me: Me) -> Tensor | str:
    """The words of the refusal, where it is refused."""
    try:
        return gradient(me, ROW, lambda x: functional.all_reduce(x, "avg", everyone()))
    except RuntimeError as error:
        return str(error)


def check_mean_of_weights(got: list[Tensor | str]) -> None:
    n = len(got)
    want = torch.stack([weights(rank, ROW) for rank in range(n)]).sum(0) / n
    assert_each_rank(got, [want] * n, within_ulps=n)


@not_probed()
@chapter.must(
    "functional/avg-gradient",
    "The gradient of the functional all_reduce by avg is the mean of all ranks' gradients, or it "
    "is refused.",
    source="pytorch#190304",
    needs="reduce_op:avg",
    rests_on="functional/all_reduce-gradient",
)
@world_sizes(2, 4)
def test_functional_average(ranks: Ranks) -> None:
    got = ranks.run(through_functional_average)
    if all(isinstance(one, str) for one in got):
        for rank, words in enumerate(got):
            assert_that("only supports 'sum'" in words, f"was refused with {words!r}", rank)
        return
    check_mean_of_weights(got)


@not_probed()
@chapter.should(
    "functional/avg-gradient-works",
    "The functional all_reduce by avg can be differentiated.",
    source="pytorch#190304",
    needs="reduce_op:avg",
    rests_on="functional/avg-gradient",
)
@world_sizes(2, 4)
def test_functional_average_is_differentiable(ranks: Ranks) -> None:
    got = ranks.run(through_functional_average)
    for rank, one in enumerate(got):
        assert_that(not isinstance(one, str), f"was refused with {one!r}", rank)
    check_mean_of_weights(got)


def through_functional_gather(me: Me) -> Tensor:
    return gradient(me, (2, 3), lambda x: functional.all_gather_tensor_autograd(x, 0, everyone()))


@chapter.must(
    "functional/all_gather-gradient",
    "The gradient of the functional all_gather_tensor is the sum over all ranks of their "
    "gradients for this rank's part.",
    source=f"{SOURCE}, all_gather_into_tensor_backward",
    needs="feature:coalescing",
    rests_on=("functional/all_gather_tensor", "functional/reduce_scatter_tensor"),
)
@world_sizes(1, 2, 3)
def test_functional_all_gather(ranks: Ranks) -> None:
    n = ranks.world_size
    total = torch.stack([weights(rank, (2 * n, 3)) for rank in range(n)]).sum(0)
    assert_each_rank(ranks.run(through_functional_gather), list(total.chunk(n)))


def through_nn_gather(me: Me) -> Tensor:
    with deprecated_names():
        return gradient(me, ROW, nn.all_gather)


@chapter.must(
    "autograd/all_gather",
    "nn.functional.all_gather differentiates to the sum over all ranks of their gradients for "
    "this rank's part.",
    source=f"{NN}; pytorch/xla#5784",
    rests_on=("all_gather/values", "all_to_all/values"),
)
@world_sizes(1, 2, 3)
def test_all_gather(ranks: Ranks) -> None:
    """A rank's own weights for its part are not enough: all ranks have used it."""
    n = ranks.world_size
    total = torch.stack([weights(rank, (n, *ROW)) for rank in range(n)]).sum(0)
    assert_each_rank(ranks.run(through_nn_gather), list(total.unbind()))


def through_functional_scatter(me: Me) -> Tensor:
    def call(x: Tensor) -> Any:
        return functional.reduce_scatter_tensor_autograd(x, "sum", 0, everyone())

    return gradient(me, (2 * me.world_size, 3), call)


@chapter.must(
    "functional/reduce_scatter-gradient",
    "The gradient of the functional reduce_scatter_tensor gathers all ranks' gradients.",
    source=f"{SOURCE}, reduce_scatter_tensor_backward",
    needs="feature:coalescing",
    rests_on=("functional/all_gather_tensor", "functional/reduce_scatter_tensor"),
)
@world_sizes(1, 2, 3)
def test_functional_reduce_scatter(ranks: Ranks) -> None:
    n = ranks.world_size
    want = torch.cat([weights(rank, (2, 3)) for rank in range(n)])
    assert_each_rank(ranks.run(through_functional_scatter), [want] * n)


def through_nn_scatter_sum(me: Me) -> Tensor:
    def call(x: Tensor) -> Any:
        output = torch.zeros(ROW, dtype=x.dtype, device=x.device)
        return nn.reduce_scatter(output, list(x.unbind()))

    with deprecated_names():
        return gradient(me, (me.world_size, *ROW), call)


@chapter.must(
    "autograd/reduce_scatter",
    "nn.functional.reduce_scatter differentiates to every rank's gradient for its part.",
    rests_on=("reduce_scatter/sum", "all_gather/values"),
)
@world_sizes(1, 2, 3)
def test_reduce_scatter(ranks: Ranks) -> None:
    n = ranks.world_size
    want = torch.stack([weights(rank, ROW) for rank in range(n)])
    assert_each_rank(ranks.run(through_nn_scatter_sum), [want] * n)


def through_functional_exchange(me: Me) -> Tensor:
    def call(x: Tensor) -> Any:
        return functional.all_to_all_single_autograd(x, *sizes(me), everyone())

    return gradient(me, (rows_of(me.rank, me.world_size), 2), call)


def through_nn_exchange(me: Me) -> Tensor:
    def call(x: Tensor) -> Any:
        received, sent = sizes(me)
        output = torch.zeros((sum(received), 2), dtype=x.dtype, device=x.device)
        return nn.all_to_all_single(output, x, received, sent)

    with deprecated_names():
        return gradient(me, (rows_of(me.rank, me.world_size), 2), call)


def rows(source: int, destination: int) -> int:
    return 1 + (source + 2 * destination) % 3


def rows_of(source: int, world_size: int) -> int:
    """How many rows it sends in all."""
    return sum(rows(source, to) for to in range(world_size))


def sizes(me: Me) -> tuple[list[int], list[int]]:
    """How many rows this rank gets from each, and sends to each."""
    each = range(me.world_size)
    return [rows(source, me.rank) for source in each], [rows(me.rank, to) for to in each]


def check_weights_sent_back(ranks: Ranks, function: Callable[[Me], Tensor]) -> None:
    n = ranks.world_size
    want = []
    for source in range(n):
        blocks = []
        for to in range(n):
            received = [rows(one, to) for one in range(n)]
            blocks.append(torch.split(weights(to, (sum(received), 2)), received)[source])
        want.append(torch.cat(blocks))
    assert_each_rank(ranks.run(function), want)


@chapter.must(
    "functional/all_to_all-gradient",
    "The gradient of the functional all_to_all_single is sent back with the same splits.",
    source=f"{SOURCE}, all_to_all_single_backward",
    rests_on="functional/all_to_all_single",
)
@world_sizes(2, 3)
def test_functional_all_to_all_single(ranks: Ranks) -> None:
    check_weights_sent_back(ranks, through_functional_exchange)


@chapter.must(
    "autograd/all_to_all_single",
    "nn.functional.all_to_all_single differentiates to the gradients sent back with input and "
    "output splits exchanged.",
    rests_on="all_to_all_single/uneven",
)
@world_sizes(2, 3)
def test_all_to_all_single(ranks: Ranks) -> None:
    check_weights_sent_back(ranks, through_nn_exchange)


def through_nn_lists(me: Me) -> Tensor:
    def call(x: Tensor) -> Any:
        outputs = [torch.zeros(ROW, dtype=x.dtype, device=x.device) for _ in range(me.world_size)]
        return nn.all_to_all(outputs, list(x.unbind()))

    with deprecated_names():
        return gradient(me, (me.world_size, *ROW), call)


@chapter.must(
    "autograd/all_to_all",
    "nn.functional.all_to_all differentiates to the gradients sent back to the ranks that the "
    "parts came from.",
    rests_on="all_to_all/values",
)
@world_sizes(1, 2, 3)
def test_all_to_all(ranks: Ranks) -> None:
    n = ranks.world_size
    each = [weights(rank, (n, *ROW)) for rank in range(n)]
    want = [torch.stack([each[to][source] for to in range(n)]) for source in range(n)]
    assert_each_rank(ranks.run(through_nn_lists), want)


def through_nn_broadcast(me: Me) -> Tensor:
    with deprecated_names():
        return gradient(me, ROW, lambda x: nn.broadcast(x, me.world_size - 1))


@chapter.must(
    "autograd/broadcast",
    "nn.functional.broadcast differentiates to the sum of all ranks' gradients on the source, "
    "and to zero elsewhere.",
    rests_on=("broadcast/values", "reduce/sum"),
)
@world_sizes(1, 2, 3)
def test_broadcast(ranks: Ranks) -> None:
    n = ranks.world_size
    total = torch.stack([weights(rank, ROW) for rank in range(n)]).sum(0)
    assert_each_rank(ranks.run(through_nn_broadcast), [torch.zeros_like(total)] * (n - 1) + [total])


def through_nn_reduce(me: Me) -> Tensor:
    with deprecated_names():
        return gradient(me, ROW, lambda x: nn.reduce(x, me.world_size - 1))


@chapter.must(
    "autograd/reduce",
    "nn.functional.reduce differentiates to the destination's gradient on every rank.",
    rests_on=("broadcast/values", "reduce/sum"),
)
@world_sizes(1, 2, 3)
def test_reduce(ranks: Ranks) -> None:
    n = ranks.world_size
    assert_each_rank(ranks.run(through_nn_reduce), [weights(n - 1, ROW)] * n)


def through_nn_gather_to_one(me: Me) -> Tensor:
    with deprecated_names():
        return gradient(me, ROW, lambda x: nn.gather(x, me.world_size - 1))


@chapter.must(
    "autograd/gather",
    "nn.functional.gather differentiates to the destination's gradient for each rank's part.",
    rests_on=("gather/values", "scatter/values"),
)
@world_sizes(1, 2, 3)
def test_gather(ranks: Ranks) -> None:
    n = ranks.world_size
    want = list(weights(n - 1, (n, *ROW)).unbind())
    assert_each_rank(ranks.run(through_nn_gather_to_one), want)


def through_nn_scatter(me: Me) -> Tensor:
    with deprecated_names():
        return gradient(
            me, (me.world_size, *ROW), lambda x: nn.scatter(list(x.unbind()), me.world_size - 1)
        )


@chapter.must(
    "autograd/scatter",
    "nn.functional.scatter differentiates to every rank's gradient on the source.",
    rests_on=("gather/values", "scatter/values"),
)
@world_sizes(1, 2, 3)
def test_scatter(ranks: Ranks) -> None:
    n = ranks.world_size
    at_source = torch.stack([weights(rank, ROW) for rank in range(n)])
    want = [torch.zeros_like(at_source)] * (n - 1) + [at_source]
    assert_each_rank(ranks.run(through_nn_scatter), want)

"""Tensors that share memory: an output that is an input, one input for several, neighbours."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from conformance import Chapter, Me, Ranks, assert_each_rank, needs, world_sizes
from conformance.oracle.collectives import Call, after, before
from conformance.oracle.data import sample
from conformance.oracle.reduction import reduced
from conformance.spec.collectives.contributions import mine, of, sum_of_all
from conformance.spec.collectives.perform import issue
from conformance.spec.parameters import ops

chapter = Chapter("collectives", source="observed, torch 2.13.0 gloo")


# elements a tensor: transports often treat what is large differently
few_and_many = pytest.mark.parametrize("numel", [3, 30_000], ids=["few", "many"])


def gathered_in_place(me: Me, root: int, numel: int) -> list[Tensor]:
    """The destination's input is its own tensor of the list."""
    mine = sample((numel,), "float32", me.rank).to(me.device)
    if me.rank != root:
        dist.gather(mine, None, root)
        return [mine]
    outputs = [torch.full((numel,), -1.0, device=me.device) for _ in range(me.world_size)]
    outputs[root] = mine
    dist.gather(mine, outputs, root)
    return outputs


@chapter.must(
    "gather/in-place",
    "The destination's input of gather may be its own tensor of the list.",
    needs="op:gather",
    rests_on="gather/values",
)
@world_sizes(1, 2, 3)
@few_and_many
def test_gather_from_its_own_output(ranks: Ranks, numel: int) -> None:
    everyone = [sample((numel,), "float32", rank) for rank in range(ranks.world_size)]
    for root in range(ranks.world_size):
        want = [everyone if r == root else [everyone[r]] for r in range(ranks.world_size)]
        assert_each_rank(ranks.run(gathered_in_place, root, numel), want, what=f"to rank {root}")


def scattered_in_place(me: Me, root: int, numel: int) -> list[Tensor]:
    """The source's output is its own tensor of the list."""
    if me.rank != root:
        output = torch.full((numel,), -1.0, device=me.device)
        dist.scatter(output, None, root)
        return [output]
    inputs = [sample((numel,), "float32", to).to(me.device) for to in range(me.world_size)]
    dist.scatter(inputs[root], inputs, root)
    return inputs


@chapter.must(
    "scatter/in-place",
    "The source's output of scatter may be its own tensor of the list.",
    needs="op:scatter",
    rests_on="scatter/values",
)
@world_sizes(1, 2, 3)
@few_and_many
def test_scatter_into_its_own_input(ranks: Ranks, numel: int) -> None:
    blocks = [sample((numel,), "float32", to) for to in range(ranks.world_size)]
    for root in range(ranks.world_size):
        want = [blocks if r == root else [blocks[r]] for r in range(ranks.world_size)]
        assert_each_rank(ranks.run(scattered_in_place, root, numel), want, what=f"from rank {root}")


def parts_of(rank: int, world_size: int, numel: int) -> list[Tensor]:
    return [sample((numel,), "float32", rank, salt=to) for to in range(world_size)]


def reduce_scattered_in_place(me: Me, numel: int, shift: int) -> list[Tensor]:
    """The output is element (rank + shift) modulo N of the list of inputs."""
    inputs = [x.to(me.device) for x in parts_of(me.rank, me.world_size, numel)]
    dist.reduce_scatter(inputs[(me.rank + shift) % me.world_size], inputs)
    return inputs


def check_reduce_scattered_in_place(ranks: Ranks, numel: int, shift: int) -> None:
    n = ranks.world_size
    want = [parts_of(rank, n, numel) for rank in range(n)]
    sums = [reduced("sum", of_one) for of_one in zip(*want, strict=True)]
    for rank, inputs in enumerate(want):
        inputs[(rank + shift) % n] = sums[rank]
    assert_each_rank(ranks.run(reduce_scattered_in_place, numel, shift), want)


@chapter.must(
    "reduce_scatter/in-place",
    "reduce_scatter's output may be the rank's own tensor of the list; the other tensors do not "
    "change.",
    needs=("op:reduce_scatter", "reduce_op:sum"),
    rests_on="reduce_scatter/sum",
)
@world_sizes(1, 2, 3)
@few_and_many
def test_reduce_scatter_into_its_own_input(ranks: Ranks, numel: int) -> None:
    check_reduce_scattered_in_place(ranks, numel, 0)


@chapter.should(
    "reduce_scatter/into-another-input",
    "reduce_scatter's output may be any tensor of the list: it is read before it is written.",
    source="derived: nothing in torch's documentation forbids it, and torch's gloo takes it",
    needs=("op:reduce_scatter", "reduce_op:sum"),
    rests_on="reduce_scatter/in-place",
)
@world_sizes(2, 3)
@few_and_many
def test_reduce_scatter_into_the_input_for_another_rank(ranks: Ranks, numel: int) -> None:
    check_reduce_scattered_in_place(ranks, numel, 1)


def one_input_for_all(me: Me, op: str) -> list[Tensor]:
    """Every entry of the list of inputs is the same tensor."""
    inputs = [mine(me)] * me.world_size
    outputs = [torch.full_like(mine(me), -1.0) for _ in range(me.world_size)]
    if op == "all_to_all":
        dist.all_to_all(outputs, inputs)
        return outputs
    if op == "scatter":
        dist.scatter(outputs[0], inputs if me.rank == 0 else None, 0)
    else:
        dist.reduce_scatter(outputs[0], inputs)
    return outputs[:1]


@chapter.must(
    "order/one-input-for-all",
    "One tensor may be the input for several ranks: each of them gets its values.",
    source="derived: the same padding for every rank",
    rests_on=("scatter/values", "reduce_scatter/sum", "all_to_all/values"),
)
@world_sizes(2, 3)
@pytest.mark.parametrize(
    "op",
    [
        pytest.param("scatter", marks=needs("op:scatter")),
        pytest.param("reduce_scatter", marks=needs("op:reduce_scatter", "reduce_op:sum")),
        pytest.param("all_to_all", marks=needs("op:all_to_all")),
    ],
)
def test_the_same_tensor_for_every_rank(ranks: Ranks, op: str) -> None:
    n = ranks.world_size
    want = {"scatter": [of(0)], "reduce_scatter": [sum_of_all(n)]}
    all_of_them = [of(rank) for rank in range(n)]
    assert_each_rank(ranks.run(one_input_for_all, op), [want.get(op, all_of_them)] * n)


BEHIND = torch.full((1,), 77.0)  # an element behind the last output


def into_neighbours(me: Me, call: Call) -> Tensor:
    """The memory in which the outputs lie, one behind the other."""
    buffers = before(call, me.rank, me.world_size)
    memory = torch.cat([*map(Tensor.flatten, buffers.taken), BEHIND]).to(me.device)
    *flat, _ = memory.split([*(x.numel() for x in buffers.taken), 1])
    taken = [x.view(like.shape) for x, like in zip(flat, buffers.taken, strict=True)]
    issue(call, [x.to(me.device) for x in buffers.given], taken)
    return memory


@chapter.must(
    "order/neighbours",
    "The outputs of a list may be neighbours in one memory: each gets its own elements, and what "
    "lies behind the last one does not change.",
    source="derived: blocks that are rounded up",
    rests_on="order/sizes",
)
@pytest.mark.parametrize("op", ops("all_gather", "gather", "all_to_all"))
@pytest.mark.parametrize("numel", [1, 5, 1023])
@world_sizes(2, 3)
def test_outputs_side_by_side(ranks: Ranks, op: str, numel: int) -> None:
    n = ranks.world_size
    call = Call(op, (numel,), root=n - 1 if op == "gather" else 0)
    outputs = [after(call, rank, n).taken for rank in range(n)]
    want = [torch.cat([*map(Tensor.flatten, taken), BEHIND]) for taken in outputs]
    assert_each_rank(ranks.run(into_neighbours, call), want)

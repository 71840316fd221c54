"""What the process group's collectives do to tensors; ranks are threads, memory is shared."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from impl import errors
from impl.gloo import ProcessGroupGloo
from tests.impl.gloo.ranks import in_groups

WORLD_SIZES = [1, 2, 3, 4]
each_world = pytest.mark.parametrize("world_size", WORLD_SIZES)
c10d = dist.distributed_c10d


def ranks_of(group: ProcessGroupGloo) -> range:
    return range(group.size())


def own(group: ProcessGroupGloo, *shape: int) -> Tensor:
    """Different on every rank and in every element."""
    numel = torch.Size(shape).numel()
    return (torch.arange(float(numel)) + 100 * group.rank()).reshape(shape)


def of_rank(rank: int, *shape: int) -> Tensor:
    return (torch.arange(float(torch.Size(shape).numel())) + 100 * rank).reshape(shape)


# -- reductions


@each_world
def test_short_forms(world_size: int) -> None:
    def run(group: ProcessGroupGloo) -> None:
        tensor = own(group, 2)
        group.allreduce(tensor, ReduceOp.MAX).wait()
        assert torch.equal(tensor, of_rank(world_size - 1, 2))
        tensor = own(group, 2)
        group.allreduce([tensor], op=ReduceOp.MIN).wait()
        assert torch.equal(tensor, of_rank(0, 2))
        tensor = own(group, 2)
        group.broadcast(tensor, world_size - 1).wait()
        assert torch.equal(tensor, of_rank(world_size - 1, 2))
        group.broadcast(tensor, root=0, timeout=timedelta(seconds=5)).wait()
        outputs = [torch.zeros(2) for _ in ranks_of(group)]
        group.allgather(outputs, tensor).wait()
        group.reduce(tensor, 0, ReduceOp.SUM).wait()
        group.gather(outputs if group.rank() == 0 else [], tensor, 0).wait()
        group.scatter(tensor, outputs if group.rank() == 0 else [], 0).wait()
        group.reduce_scatter(tensor, outputs, ReduceOp.SUM).wait()
        group.barrier(timeout=timedelta(seconds=5)).wait()
        group.barrier(timedelta(seconds=5)).wait()

    in_groups(world_size, run)


@each_world
def test_keywords_of_short_forms(world_size: int) -> None:
    def run(group: Any) -> None:
        last, is_first = of_rank(world_size - 1, 2), group.rank() == 0
        tensor, outputs = own(group, 2), [torch.zeros(2) for _ in ranks_of(group)]
        group.allreduce(tensor=tensor, op=ReduceOp.MAX, timeout=5.0).wait()
        assert torch.equal(tensor, last)
        group.broadcast(tensor=tensor, root=0).wait(5.0)
        group.allgather(outputs, input_tensor=own(group, 2)).wait()
        assert torch.equal(outputs[-1], last)
        tensor.zero_()
        group.scatter(
            output_tensor=tensor, input_tensors=outputs if is_first else [], root=0
        ).wait()
        assert torch.equal(tensor, own(group, 2))
        group.gather(outputs if is_first else [], input_tensor=last, root=0).wait()
        group.reduce(root=0, op=ReduceOp.SUM, tensor=tensor).wait()
        group.reduce_scatter(output=tensor, input=[last] * world_size, op=ReduceOp.AVG).wait()
        assert torch.equal(tensor, last)
        whole = torch.cat([last] * world_size)
        group._reduce_scatter_base(outputTensor=tensor, inputTensor=whole).wait()
        assert torch.equal(tensor, last * world_size)
        group.monitored_barrier(timeout=5.0)

    in_groups(world_size, run)


def test_keywords_that_are_missing_doubled_or_unknown() -> None:
    def run(group: Any) -> None:
        x = torch.ones(2)
        for arguments in ({}, {"tensor": x, "tensors": [x]}, {"tensor": x, "other": x}):
            for method in (group.allreduce, group.broadcast):
                with pytest.raises(TypeError):
                    method(**arguments)
        with pytest.raises(TypeError):
            group.broadcast([x], tensor=x)
        with pytest.raises(
            TypeError, match="a timeout is a timedelta, or seconds as a float, not 5"
        ):
            group.allreduce(x, timeout=5)

    in_groups(1, run)


@each_world
def test_several_tensors_are_reduced_with_each_other(world_size: int) -> None:
    def run(group: ProcessGroupGloo) -> None:
        tensors = [own(group, 3), own(group, 3) * 2]
        group.allreduce(tensors).wait()
        want = torch.as_tensor(sum(of_rank(rank, 3) * 3 for rank in ranks_of(group)))
        assert torch.equal(tensors[0], want)
        assert torch.equal(tensors[1], want)

    in_groups(world_size, run)


@each_world
def test_reduce_scatter_of_lists(world_size: int) -> None:
    def run(group: ProcessGroupGloo) -> None:
        inputs = [own(group, 2, 3) + 7 * rank for rank in ranks_of(group)]
        output = torch.zeros(3, 2).t()
        group.reduce_scatter([output], [inputs], ReduceOp.MAX).wait()
        assert torch.equal(output, of_rank(world_size - 1, 2, 3) + 7 * group.rank())
        inputs[group.rank()] = torch.zeros(5)
        with pytest.raises(RuntimeError, match="invalid tensor size"):
            group.reduce_scatter([output], [inputs])

    in_groups(world_size, run)


@pytest.mark.parametrize("transport", ["shm", "tcp", "gloo"])
@pytest.mark.parametrize(
    ("op", "whole", "each"), [(ReduceOp.SUM, 9, 3), (ReduceOp.AVG, 3, 1), (ReduceOp.MAX, 6, 1)]
)
def test_reduce_scatter_of_uneven_lists(
    transport: str, op: ReduceOp, whole: int, each: int
) -> None:
    lengths = [3, 0, 5]

    def run(group: ProcessGroupGloo) -> Tensor:
        inputs = [
            torch.full((length,), 3 * group.rank() + place, dtype=torch.int16)
            for place, length in enumerate(lengths)
        ]
        given = [each.clone() for each in inputs]
        output = torch.full((lengths[group.rank()],), -1, dtype=torch.int16)
        group.reduce_scatter([output], [inputs], op).wait()
        assert all(map(torch.equal, inputs, given))
        return output

    for place, output in enumerate(in_groups(3, run, transport=transport)):
        assert output.tolist() == [whole + each * place] * lengths[place]


def test_ranks_with_different_uneven_lists() -> None:
    def run(group: ProcessGroupGloo) -> None:
        rank = group.rank()
        inputs = [torch.zeros(4 + rank), torch.zeros(4 + rank), torch.zeros(5)]
        inputs[rank] = torch.zeros(7)
        with pytest.raises(errors.CollectiveMismatch, match=r"7,4,5.*|5,7,5.*"):
            group.reduce_scatter([torch.zeros(7)], [inputs]).wait()

    in_groups(3, run)


@each_world
def test_averages_of_narrow_types(world_size: int) -> None:
    def run(group: ProcessGroupGloo) -> None:
        halves = torch.full((3,), 60000.0, dtype=torch.float16)
        group.allreduce([halves], ReduceOp.AVG).wait()
        assert halves.eq(60000).all()
        output = torch.zeros(3, dtype=torch.uint8)
        hundreds = torch.full((3 * world_size,), 100, dtype=torch.uint8)
        group.reduce_scatter_single(output, hundreds, avg()).wait()
        assert output.eq(100).all()

    def avg() -> Any:
        options: Any = c10d.ReduceScatterOptions()
        options.reduceOp = ReduceOp.AVG
        return options

    in_groups(world_size, run)


@each_world
def test_coalesced_forms_keep_dtypes_apart(world_size: int) -> None:
    def run(group: ProcessGroupGloo) -> None:
        ints, floats = torch.tensor([1]), torch.tensor([1.5])
        outputs = [
            torch.zeros(world_size, dtype=torch.int64),
            torch.zeros(world_size, dtype=torch.float32),
        ]
        group.all_gather_single_coalesced(outputs, [ints, floats]).wait()
        assert outputs[0].tolist() == [1] * world_size
        assert outputs[1].tolist() == [1.5] * world_size
        tensors = [own(group, 2), own(group, 3)]
        group.allreduce_coalesced(tensors).wait()
        for tensor, numel in zip(tensors, (2, 3), strict=True):
            want = sum(of_rank(rank, numel) for rank in ranks_of(group))
            assert torch.equal(tensor, torch.as_tensor(want))
        lists = [[torch.zeros(2), torch.zeros(3)] for _ in ranks_of(group)]
        group.allgather_coalesced(lists, [own(group, 2), own(group, 3)]).wait()
        for rank in ranks_of(group):
            assert torch.equal(lists[rank][1], of_rank(rank, 3))

    in_groups(world_size, run)


# -- sparse


def test_sparse_tensors_that_do_not_fit_are_named() -> None:
    def run(group: ProcessGroupGloo) -> None:
        size = 2 + (group.rank() == 1)
        tensor = torch.sparse_coo_tensor(
            torch.zeros(1, 1, dtype=torch.int64), torch.ones(1), (size,), check_invariants=True
        )
        with pytest.raises(errors.CollectiveMismatch, match=r"rank 1 .* \(3,\).*<- differs"):
            group.allreduce([tensor]).wait()
        with pytest.raises(RuntimeError, match=r"only works with ReduceOp\.SUM"):
            group.allreduce([tensor], ReduceOp.MAX)

    in_groups(3, run)


def test_layouts_without_an_algorithm_are_refused() -> None:
    def run(group: ProcessGroupGloo) -> None:
        with pytest.raises(RuntimeError, match="unsupported layout"):
            group.allreduce([torch.eye(2).to_mkldnn()])
        with pytest.raises(RuntimeError, match="only supports dense tensors"):
            group.broadcast([torch.eye(2).to_mkldnn()])

    in_groups(1, run)


# -- gathers and exchanges


@each_world
def test_allgather_of_several_inputs(world_size: int) -> None:
    def run(group: ProcessGroupGloo) -> None:
        inputs = [own(group, 2), own(group, 2) + 50]
        lists = [[torch.zeros(2) for _ in range(2 * world_size)] for _ in inputs]
        group.allgather(lists, inputs).wait()
        for outputs in lists:
            for rank in ranks_of(group):
                assert torch.equal(outputs[2 * rank], of_rank(rank, 2))
                assert torch.equal(outputs[2 * rank + 1], of_rank(rank, 2) + 50)

    in_groups(world_size, run)


@each_world
def test_a_tensor_given_twice_where_all_get_one_result(world_size: int) -> None:
    def run(group: ProcessGroupGloo) -> None:
        total = torch.stack([of_rank(r, 2) for r in ranks_of(group)]).sum(0)
        twice, once = own(group, 2), own(group, 2)
        given = [twice, twice, once] if group.rank() == 0 else [twice, once, own(group, 2)]
        future = group.allreduce_coalesced(given).get_future()
        assert all(torch.equal(result, total) for result in future.wait())
        assert torch.equal(twice, total) and torch.equal(once, total)
        tensor = own(group, 2)
        group.allreduce([tensor, tensor[:]]).wait()
        assert torch.equal(tensor, 2 * total)
        source, target = own(group, 2), torch.zeros(2)
        group.broadcast([source, target, target], root=0).wait()
        assert torch.equal(target, of_rank(0, 2))
        buffer = torch.zeros(3)
        with pytest.raises(RuntimeError, match="shares memory"):
            group.allreduce_coalesced([buffer[:2], buffer[1:]])

    in_groups(world_size, run)


@each_world
def test_all_to_all_in_place(world_size: int) -> None:
    def run(group: ProcessGroupGloo) -> None:
        tensor = own(group, world_size)
        group.all_to_all_single(tensor, tensor, [], []).wait()
        want = torch.stack([of_rank(r, world_size)[group.rank()] for r in ranks_of(group)])
        assert torch.equal(tensor, want)

    in_groups(world_size, run)

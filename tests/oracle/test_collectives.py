"""The oracle of the collectives, against the tables of torch's documentation and against itself."""

from __future__ import annotations

import pytest
import torch

from conformance.oracle.collectives import (
    COLLECTIVES,
    Call,
    after,
    before,
    contribution,
    receives,
    rounded_after,
)
from conformance.oracle.reduction import reduced


@pytest.mark.parametrize("op", COLLECTIVES)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_outputs_keep_shape_and_dtype_and_share_no_memory(op: str, world_size: int) -> None:
    for rank in range(world_size):
        first, last = (f(Call(op, (2, 3)), rank, world_size) for f in (before, after))
        assert [x.shape for x in first.taken] == [x.shape for x in last.taken]
        assert all(torch.equal(a, b) for a, b in zip(first.given, last.given, strict=True))
        assert len({x.data_ptr() for x in first.taken}) == len(first.taken)


def test_all_reduce_is_reduce_everywhere() -> None:
    everywhere = [after(Call("all_reduce"), rank, 3).taken[0] for rank in range(3)]
    at_root = [after(Call("reduce", root=rank), rank, 3).taken[0] for rank in range(3)]
    assert all(torch.equal(a, b) for a, b in zip(everywhere, at_root, strict=True))


@pytest.mark.parametrize("op", ["all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor"])
@pytest.mark.parametrize("reduce_op", ["sum", "product", "avg"])
def test_what_rounds_is_near_to_what_is_reduced(op: str, reduce_op: str) -> None:
    call = Call(op, (20,), "float32", reduce_op, root=1, noisy=True)
    near = rounded_after(call, 1, 3)
    assert not near.off(after(call, 1, 3).taken[0]).any()
    assert near.off(contribution(call, 1)).all()


def test_reduce_leaves_the_others() -> None:
    call = Call("reduce", root=1)
    assert torch.equal(after(call, 0, 2).taken[0], contribution(call, 0))
    assert [receives(call, rank) for rank in range(2)] == [False, True]
    assert receives(Call("broadcast", root=1), 0)


@pytest.mark.parametrize(
    ("whole", "parts"),
    [("all_gather_into_tensor", "all_gather"), ("all_to_all_single", "all_to_all")],
)
def test_the_list_and_the_tensor_forms_agree(whole: str, parts: str) -> None:
    for rank in range(3):
        listed = after(Call(parts, (2, 2)), rank, 3).taken
        assert torch.equal(after(Call(whole, (2, 2)), rank, 3).taken[0], torch.cat(listed))


def test_reduce_scatter_of_a_list_and_of_a_tensor_agree() -> None:
    listed = after(Call("reduce_scatter"), 1, 3).taken
    assert torch.equal(after(Call("reduce_scatter_tensor"), 1, 3).taken[0], listed[0])


def test_stacks() -> None:
    stacked = after(Call("all_gather_into_tensor", (), stacked=True), 0, 3).taken[0]
    assert stacked.shape == (3,)


def test_roots_alone_have_lists() -> None:
    scatter, gather = Call("scatter", root=1), Call("gather", root=2)
    dealt = [after(scatter, rank, 3).taken[0] for rank in range(3)]
    hand = before(scatter, 1, 3).given
    assert all(torch.equal(a, b) for a, b in zip(dealt, hand, strict=True))
    assert before(scatter, 0, 3).given == before(gather, 0, 3).taken == ()
    assert len(after(gather, 2, 3).taken) == 3


def test_reduce_scatter_gives_each_rank_its_own_part() -> None:
    call = Call("reduce_scatter")
    for rank in range(2):
        parts = [contribution(call, source, rank) for source in range(2)]
        assert torch.equal(after(call, rank, 2).taken[0], reduced("sum", parts))
    assert not torch.equal(contribution(call, 0, 0), contribution(call, 0, 1))


def test_uneven_splits() -> None:
    call = Call("all_to_all_single", (1, 2), splits=((0, 2), (3, 1)))
    assert before(call, 0, 2).given[0].shape == (2, 2)
    assert before(call, 1, 2).taken[0].shape == (3, 2)
    want = torch.cat([contribution(call, 0, 1), contribution(call, 1, 1)])
    assert torch.equal(after(call, 1, 2).taken[0], want)

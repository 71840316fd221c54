"""Gradients through collectives in any group and of any layout, and functional collectives alike.

A collective that adds or moves is linear, and its gradient is its adjoint: over all ranks together,
the products of results with the gradients that are given for them, and of inputs with the gradients
that come back, have the same sum. So one check does for all of them. Contributions are whole
numbers, whose sums are exact.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as nn
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from conformance import Chapter, Me, Ranks, adapts, assert_that, world_sizes
from conformance.oracle.collectives import Call, before
from conformance.oracle.data import sample
from conformance.oracle.layout import Layout, place
from conformance.spec.collectives.gradients import deprecated_names
from conformance.spec.collectives.perform import Seen, assert_taken
from conformance.spec.collectives.strategies import calls, strides

SOURCE = "torch 2.13, torch.distributed._functional_collectives"
NN = "torch 2.13, torch.distributed.nn.functional"

chapter = Chapter("collectives", source=NN)


BLOCK = (2, 3)
LAYOUTS = ("dense", "transposed", "expanded", "with gaps")


def laid_out(shape: Sequence[int], layout: str, rank: int, salt: int) -> Tensor:
    """Numbers of this rank in a tensor of two dimensions or more."""
    *outer, rows, columns = shape
    match layout:
        case "transposed":
            return sample((*outer, columns, rows), "float64", rank, salt).transpose(-1, -2)
        case "expanded":
            return sample((*outer, 1, columns), "float64", rank, salt).expand(tuple(shape))
        case "with gaps":
            return sample((*outer, rows, 2 * columns), "float64", rank, salt)[..., ::2]
    return sample(shape, "float64", rank, salt)


def zeros_like_blocks(x: Tensor, count: int) -> list[Tensor]:
    return [torch.zeros(BLOCK, dtype=x.dtype, device=x.device) for _ in range(count)]


def splits(rank: int, size: int) -> tuple[list[int], list[int]]:
    """Rows that a rank gets from each, and sends to each: two for itself, one for others."""
    rows = [2 if other == rank else 1 for other in range(size)]
    return rows, rows


Through = Callable[[Tensor, Any, int], Any]

# What takes one block of each rank, by name; `root` is a global rank.
OF_A_BLOCK: dict[str, Through] = {
    "nn.all_reduce": lambda x, group, root: nn.all_reduce(x, group=group),
    "nn.all_gather": lambda x, group, root: nn.all_gather(x, group),
    "nn.reduce": lambda x, group, root: nn.reduce(x, root, group=group),
    "all_reduce": lambda x, group, root: functional.all_reduce(x, "sum", group),
    "all_gather 0": lambda x, group, root: functional.all_gather_tensor_autograd(x, 0, group),
    "all_gather 1": lambda x, group, root: functional.all_gather_tensor_autograd(x, 1, group),
}
ROOTED: dict[str, Through] = {
    "nn.broadcast": lambda x, group, root: nn.broadcast(x, root, group),
    "nn.gather": lambda x, group, root: nn.gather(x, root, group),
    "nn.scatter": lambda x, group, root: nn.scatter(list(x.unbind()), root, group),
}
# What takes a block of each rank for each rank, stacked or side by side.
OF_BLOCKS: dict[str, Through] = {
    "nn.reduce_scatter": lambda x, group, root: nn.reduce_scatter(
        zeros_like_blocks(x, 1)[0], list(x.unbind()), group=group
    ),
    "nn.all_to_all": lambda x, group, root: nn.all_to_all(
        zeros_like_blocks(x, len(x)), list(x.unbind()), group
    ),
    "reduce_scatter 0": lambda x, group, root: functional.reduce_scatter_tensor_autograd(
        x.flatten(0, 1), "sum", 0, group
    ),
    "reduce_scatter 1": lambda x, group, root: functional.reduce_scatter_tensor_autograd(
        torch.cat(list(x.unbind()), 1), "sum", 1, group
    ),
    "all_to_all": lambda x, group, root: functional.all_to_all_single_autograd(
        x.flatten(0, 1)[: len(x) + 1], *splits(dist.get_rank(group), len(x)), group
    ),
}
ALL = {**OF_A_BLOCK, **ROOTED, **OF_BLOCKS}


@dataclass(frozen=True, slots=True)
class Way:
    """A function, its group and root, and how its input and the gradient of its result lie."""

    name: str
    members: tuple[int, ...]
    root: int
    given: str
    returned: str

    def input_shape(self) -> tuple[int, ...]:
        takes_all = self.name in OF_BLOCKS or self.name == "nn.scatter"
        return (len(self.members), *BLOCK) if takes_all else BLOCK


def products(me: Me, way: Way) -> tuple[float, float]:
    """Of this rank's results and their gradients, and of its input and the gradient of that."""
    group: Any = dist.new_group(list(way.members))
    if me.rank not in way.members:
        return 0.0, 0.0
    x = laid_out(way.input_shape(), way.given, me.rank, 1).to(me.device)
    leaf = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    with deprecated_names():
        found = ALL[way.name](leaf, group, way.root)
        results = [found] if isinstance(found, Tensor) else list(found)
        returned = [
            laid_out(y.shape, way.returned, me.rank, 5 + i).to(me.device)
            for i, y in enumerate(results)
        ]
        if way.name == "nn.reduce" and me.rank != way.root:  # it has no result here
            returned = [torch.zeros_like(w) for w in returned]
        torch.autograd.backward(results, returned)
    assert leaf.grad is not None
    got = sum(float((y.detach() * w).sum()) for y, w in zip(results, returned, strict=True))
    return got, float((leaf.detach() * leaf.grad).sum())


def check(ranks: Ranks, way: Way) -> None:
    got = ranks.run(products, way)
    want, found = (sum(mine[i] for mine in got) for i in range(2))
    assert_that(
        want == found,
        f"{way}: results times their gradients are {want} on all ranks together, but inputs "
        f"times theirs {found}",
    )


@st.composite
def ways(
    draw: st.DrawFn,
    name: str,
    groups: Sequence[tuple[int, ...]],
    layouts: Sequence[str],
) -> Way:
    members = draw(st.sampled_from(groups))
    return Way(
        name,
        members,
        draw(st.sampled_from(members)),
        draw(st.sampled_from(layouts)),
        draw(st.sampled_from(layouts)),
    )


ALL_RANKS = ((0, 1, 2),)
GROUPS = (*ALL_RANKS, (1, 2), (0, 2))


ADDING = [
    name for name in ALL if name.startswith(("all_", "reduce_", "nn.all_reduce", "nn.reduce"))
]
LISTS = ("nn.all_gather", "nn.all_to_all", "nn.gather", "nn.scatter")


@chapter.must(
    "autograd/groups",
    "Differentiation through a collective in a group of some ranks involves its members alone.",
    needs="feature:coalescing",
    rests_on=("autograd/all_reduce", "functional/all_reduce-gradient"),
)
@world_sizes(3)
@given(data=st.data())
@settings(max_examples=5)
def test_gradients_in_groups(ranks: Ranks, data: st.DataObject) -> None:
    for name in ADDING:
        check(ranks, data.draw(ways(name, GROUPS, ["dense"])))


@chapter.must(
    "autograd/lists-in-groups",
    "all_gather and all_to_all of nn.functional work, and are differentiated, in groups of some "
    "ranks as in others.",
    rests_on=("autograd/all_gather", "autograd/all_to_all"),
)
@world_sizes(3)
@given(data=st.data())
@settings(max_examples=5)
def test_gradients_of_lists_in_groups(ranks: Ranks, data: st.DataObject) -> None:
    for name in ("nn.all_gather", "nn.all_to_all"):
        check(ranks, data.draw(ways(name, GROUPS, ["dense"])))


@chapter.must(
    "autograd/roots-in-groups",
    "broadcast, gather and scatter of nn.functional take the root as a global rank, and are "
    "differentiated in groups of some ranks as in others.",
    rests_on=("autograd/broadcast", "autograd/gather", "autograd/scatter"),
)
@world_sizes(3)
@given(data=st.data())
@settings(max_examples=5)
def test_gradients_from_roots_in_groups(ranks: Ranks, data: st.DataObject) -> None:
    for name in ROOTED:
        check(ranks, data.draw(ways(name, GROUPS, ["dense"])))


@chapter.must(
    "autograd/layouts",
    "Differentiation through a collective gives the same gradient wherever the elements of the "
    "input and of the result's gradient lie: transposed, with gaps or expanded.",
    needs="feature:coalescing",
    rests_on=("autograd/all_reduce", "functional/all_reduce-gradient"),
)
@world_sizes(3)
@given(data=st.data())
@settings(max_examples=12)
def test_gradients_of_any_layout(ranks: Ranks, data: st.DataObject) -> None:
    for name in [*ADDING, "nn.broadcast"]:
        check(ranks, data.draw(ways(name, ALL_RANKS, LAYOUTS)))


@chapter.must(
    "autograd/layouts-of-lists",
    "The gradient through all_gather, all_to_all, gather or scatter of nn.functional is the same "
    "wherever the elements of the input and of the results' gradients lie; those of a sum are "
    "expanded.",
    rests_on=("autograd/all_gather", "autograd/all_to_all", "autograd/gather", "autograd/scatter"),
)
@world_sizes(3)
@given(data=st.data())
@settings(max_examples=12)
def test_gradients_of_lists_of_any_layout(ranks: Ranks, data: st.DataObject) -> None:
    for name in LISTS:
        check(ranks, data.draw(ways(name, ALL_RANKS, LAYOUTS)))


FORMS = ("all_reduce", "broadcast", "all_gather_into_tensor", "reduce_scatter_tensor")


def called_functionally(
    me: Me, call: Call, layout: Layout, members: Sequence[int], by: str
) -> tuple[Seen, bool] | None:
    """The result, and whether the input is as it was."""
    group: Any = dist.new_group(list(members))
    if me.rank not in members:
        return None
    buffers = before(call, dist.get_rank(group), dist.get_world_size(group))
    [values] = buffers.given or buffers.taken
    x = place(values, layout, me.device).view
    named = group.group_name if by == "name" else group
    if by == "mesh":
        named = DeviceMesh.from_group(group, me.device.type)
    match call.op:
        case "all_reduce":
            result = functional.all_reduce(x, call.reduce_op, named)
        case "broadcast":
            result = functional.broadcast(x, call.root, named)
        case "all_gather_into_tensor":
            result = functional.all_gather_tensor(x, 0, named)
        case _:
            result = functional.reduce_scatter_tensor(x, call.reduce_op, 0, named)
    taken: Tensor = functional.wait_tensor(result)
    return Seen((), (taken,)), torch.equal(x.cpu(), values)


@chapter.must(
    "functional/any-call",
    "A functional collective gives the same result as the collective, whatever the shape, dtype, "
    "reduction, root, strides and group of ranks, and does not change its input. The group may be "
    "given by its name or as a mesh; the source of broadcast is a rank of the group.",
    source=f"{SOURCE}, RANK_TYPES",
    needs="feature:coalescing",
    rests_on=("functional/all_reduce", "functional/subgroup", "all_reduce/shapes"),
)
@adapts()
@world_sizes(3)
@given(data=st.data())
@settings(max_examples=12)
def test_any_functional_call(ranks: Ranks, data: st.DataObject) -> None:
    for op in FORMS:
        if op in ranks.target.capabilities.ops:
            check_call(ranks, op, data)


def check_call(ranks: Ranks, op: str, data: st.DataObject) -> None:
    members = data.draw(st.sampled_from(GROUPS), label="members")
    call = data.draw(calls(op, ranks.target, len(members)), label="call")
    layouts = data.draw(st.lists(strides, min_size=3, max_size=3), label="layouts")
    for by in ("group", "name", "mesh"):
        got = ranks.run_each(called_functionally, [(call, one, members, by) for one in layouts])
        for rank in members:
            assert_that(got[rank][1], f"{call}: the input was changed", rank)
        assert_taken(call, [got[r][0] for r in members], ranks=members)

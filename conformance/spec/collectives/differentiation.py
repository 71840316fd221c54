"""Autograd through collectives, averages too, in any group and layout; functional collectives.

A collective that adds or moves is linear, and its gradient is its adjoint: over all ranks together,
the products of results with the gradients that are given for them, and of inputs with the gradients
that come back, have the same sum. So one check does for all of them. Contributions are whole
numbers, whose sums are exact.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as nn
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from conformance import (
    Chapter,
    Me,
    Ranks,
    adapts,
    assert_each_rank,
    assert_that,
    covers,
    needs,
    not_probed,
    world_sizes,
)
from conformance.oracle.collectives import Call, before
from conformance.oracle.data import sample
from conformance.oracle.layout import Layout, place
from conformance.spec.collectives.gradients import deprecated_names
from conformance.spec.collectives.perform import Seen, assert_taken, everyone
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
    "nn.all_to_all_single": lambda x, group, root: nn.all_to_all_single(
        torch.zeros_like(x), x, group=group
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
    return products_in(passed_back(me, way, ALL[way.name], group))


@dataclass(frozen=True, slots=True)
class Passes:
    """A forward pass and a backward pass.

    was: the input, and the gradients that were given for the results, as they were before.
    """

    given: Tensor
    results: list[Tensor]
    returned: list[Tensor]
    gradient: Tensor
    was: list[Tensor]


def products_in(passes: Passes) -> tuple[float, float]:
    got = sum(float((y * w).sum()) for y, w in zip(passes.results, passes.returned, strict=True))
    return got, float((passes.given * passes.gradient).sum())


def passed_back(me: Me, way: Way, through: Through, group: Any) -> Passes:
    x = laid_out(way.input_shape(), way.given, me.rank, 1).to(me.device)
    leaf = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    with deprecated_names():
        found = through(leaf, group, way.root)
        results = [found] if isinstance(found, Tensor) else list(found)
        returned = [
            laid_out(y.shape, way.returned, me.rank, 5 + i).to(me.device)
            for i, y in enumerate(results)
        ]
        if way.name == "nn.reduce" and me.rank != way.root:  # it has no result here
            returned = [torch.zeros_like(w) for w in returned]
        was = [x, *(one.clone() for one in returned)]
        found = [y.detach() * 1 for y in results]  # so that what is pending is waited for
        torch.autograd.backward(results, returned)
    assert leaf.grad is not None
    return Passes(leaf.detach(), found, returned, leaf.grad, was)


def check(ranks: Ranks, way: Way) -> None:
    check_products(way, ranks.run(products, way))


def check_products(way: Way, got: Sequence[tuple[float, float]]) -> None:
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


# What each function and its backward need.
_GATHER_OR_SCATTER = ("feature:coalescing", "op:all_gather_into_tensor", "op:reduce_scatter_tensor")
NEEDS: dict[str, tuple[str, ...]] = {
    "nn.all_reduce": ("op:all_reduce",),
    "nn.all_gather": ("op:all_gather", "op:all_to_all"),
    "nn.reduce": ("op:reduce", "op:broadcast"),
    "all_reduce": ("op:all_reduce",),
    "all_gather 0": _GATHER_OR_SCATTER,
    "all_gather 1": _GATHER_OR_SCATTER,
    "nn.broadcast": ("op:reduce", "op:broadcast"),
    "nn.gather": ("op:gather", "op:scatter"),
    "nn.scatter": ("op:gather", "op:scatter"),
    "nn.reduce_scatter": ("op:reduce_scatter", "op:all_gather"),
    "nn.all_to_all": ("op:all_to_all",),
    "nn.all_to_all_single": ("op:all_to_all_single",),
    "reduce_scatter 0": _GATHER_OR_SCATTER,
    "reduce_scatter 1": _GATHER_OR_SCATTER,
    "all_to_all": ("op:all_to_all_single",),
}
COMMON = ("reduce_op:sum", "dtype:float64")
EACH = [pytest.param(name, marks=needs(*NEEDS[name], *COMMON)) for name in ALL]


def what_has_changed(me: Me, way: Way) -> list[str]:
    passes = passed_back(me, way, ALL[way.name], everyone())
    names = ["the input", *(f"gradient {i} of the result" for i in range(len(passes.returned)))]
    now = [passes.given, *passes.returned]
    return [n for n, x, y in zip(names, now, passes.was, strict=True) if not torch.equal(x, y)]


@chapter.must(
    "autograd/gradients-unchanged",
    "Differentiation through a collective changes neither the input nor the gradients that are "
    "given for the results, which others may need.",
    source="torch 2.13 docs, extending autograd: inputs of backward must not be changed in place",
    rests_on="all_reduce/sum",
)
@adapts()
@world_sizes(3)
@pytest.mark.parametrize("name", EACH)
def test_gradients_are_not_changed(ranks: Ranks, name: str) -> None:
    n = ranks.world_size
    way = Way(name, tuple(range(n)), 1, "dense", "dense")
    assert_each_rank(ranks.run(what_has_changed, way), [[]] * n, what=f"{name}: what has changed")


# By an average instead of a sum.
AVERAGING: dict[str, Through] = {
    "nn.all_reduce": lambda x, group, root: nn.all_reduce(x, dist.ReduceOp.AVG, group),
    "nn.reduce": lambda x, group, root: nn.reduce(x, root, dist.ReduceOp.AVG, group),
    "nn.reduce_scatter": lambda x, group, root: nn.reduce_scatter(
        zeros_like_blocks(x, 1)[0], list(x.unbind()), dist.ReduceOp.AVG, group
    ),
    "reduce_scatter 0": lambda x, group, root: functional.reduce_scatter_tensor_autograd(
        x.flatten(0, 1), "avg", 0, group
    ),
}


def averaging(*names: str) -> list[Any]:
    """As parameters, each of which needs what it and its backward need."""
    return [
        pytest.param(name, marks=needs(*NEEDS[name], "reduce_op:avg", *COMMON)) for name in names
    ]


def products_of_averages(me: Me, way: Way) -> tuple[float, float] | str:
    """As `products`; the words of the refusal, where it is refused."""
    try:
        passes = passed_back(me, way, AVERAGING[way.name], everyone())
    except RuntimeError as error:
        return str(error)
    return products_in(passes)


def check_averages(ranks: Ranks, name: str) -> None:
    """Halves are exact."""
    way = Way(name, tuple(range(ranks.world_size)), 1, "dense", "dense")
    got = ranks.run(products_of_averages, way)
    if all(isinstance(one, str) for one in got):
        for rank, words in enumerate(got):
            understood = re.search(r"nly (supports 'sum'|sum reduce op)", words)
            assert_that(understood is not None, f"was refused with {words!r}", rank)
        return
    check_products(way, got)


@chapter.must(
    "autograd/average",
    "The gradient through all_reduce of nn.functional or reduce_scatter_tensor of the functional "
    "collectives by an average is divided by the number of ranks, as the average is, or it is "
    "refused.",
    source="derived; pytorch#190304",
    rests_on="autograd/all_reduce",
)
@adapts()
@not_probed()
@world_sizes(2)
@pytest.mark.parametrize("name", averaging("nn.all_reduce", "reduce_scatter 0"))
def test_gradients_of_averages(ranks: Ranks, name: str) -> None:
    check_averages(ranks, name)


@chapter.must(
    "autograd/average-in-parts",
    "The gradient through reduce or reduce_scatter of nn.functional by an average is divided by "
    "the number of ranks, as the average is, or it is refused.",
    source="derived",
    rests_on=("autograd/reduce", "autograd/reduce_scatter"),
)
@adapts()
@not_probed()
@world_sizes(2)
@pytest.mark.parametrize("name", averaging("nn.reduce", "nn.reduce_scatter"))
def test_gradients_of_averages_in_parts(ranks: Ranks, name: str) -> None:
    check_averages(ranks, name)


PERMUTATIONS = [[0, 1, 2], [0, 2, 1], [2, 1, 0], [1, 2, 0]]  # with three fixed points, one, none
ROWS = (2, 3)


def permuted_both_ways(me: Me, name: str, to: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The rows that came, and the gradient of those that went."""
    each = range(me.world_size)
    sent = [2 if rank == to[me.rank] else 0 for rank in each]
    received = [2 if to[rank] == me.rank else 0 for rank in each]
    x = sample(ROWS, "float64", me.rank, 1).to(me.device).requires_grad_()
    with deprecated_names():
        if name == "nn":
            y = nn.all_to_all_single(torch.zeros_like(x), x, received, sent)
        else:
            y = functional.all_to_all_single_autograd(x, received, sent, everyone())
        came = y.detach() * 1
        y.backward(sample(ROWS, "float64", me.rank, 5).to(me.device))
    assert x.grad is not None
    return came, x.grad


@needs("dtype:float64")
@world_sizes(3)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("nn", marks=covers("autograd/all_to_all_single")),
        pytest.param("functional", marks=covers("functional/all_to_all-gradient")),
    ],
)
def test_gradients_of_permutations(ranks: Ranks, name: str) -> None:
    for to in PERMUTATIONS:
        got = ranks.run(permuted_both_ways, name, to)
        came = [sample(ROWS, "float64", to.index(rank), 1) for rank in range(3)]
        back = [sample(ROWS, "float64", to[rank], 5) for rank in range(3)]
        assert_each_rank(got, list(zip(came, back, strict=True)), what=f"to {to}")


def permuted(me: Me, to: list[int]) -> Tensor:
    x = sample(ROWS, "float32", me.rank).to(me.device)
    result: Tensor = functional.wait_tensor(functional.permute_tensor(x.flatten(), to, everyone()))
    return result


@covers("functional/permute_tensor")
@world_sizes(3)
def test_permutations_with_fixed_points(ranks: Ranks) -> None:
    for to in PERMUTATIONS:
        want = [sample(ROWS, "float32", to.index(rank)).flatten() for rank in range(3)]
        assert_each_rank(ranks.run(permuted, to), want, what=f"to {to}")


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
    if by == "ranks":
        named = list(members)
    if by.startswith("mesh"):
        named = DeviceMesh.from_group(group, me.device.type)
        named = (named, 0) if by == "mesh and dimension" else named
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
    "given by its name, by its ranks, as a mesh, or as a mesh and a dimension; the source of "
    "broadcast is a rank of the group.",
    source=f"{SOURCE}, RANK_TYPES",
    needs="feature:coalescing",
    rests_on=("functional/all_reduce", "functional/subgroup", "all_reduce/shapes"),
)
@adapts()
@world_sizes(3)
@given(data=st.data())
@settings(max_examples=8)
def test_any_functional_call(ranks: Ranks, data: st.DataObject) -> None:
    for op in FORMS:
        if op in ranks.target.capabilities.ops:
            check_call(ranks, op, data)


def check_call(ranks: Ranks, op: str, data: st.DataObject) -> None:
    members = data.draw(st.sampled_from(GROUPS), label="members")
    call = data.draw(calls(op, ranks.target, len(members)), label="call")
    layouts = data.draw(st.lists(strides, min_size=3, max_size=3), label="layouts")
    for by in ("group", "name", "ranks", "mesh", "mesh and dimension"):
        got = ranks.run_each(called_functionally, [(call, one, members, by) for one in layouts])
        for rank in members:
            assert_that(got[rank][1], f"{call}: the input was changed", rank)
        assert_taken(call, [got[r][0] for r in members], ranks=members)

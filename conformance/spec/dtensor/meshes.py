"""DTensors on meshes of two dimensions, drawn programs there, and random numbers in DTensors."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import tensor as dt
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from conformance import Chapter, Me, Ranks, not_probed, world_sizes
from conformance.spec.dtensor.redistribute import unlike_placed
from conformance.spec.dtensor.tables import chunk_of, mesh_of, placed, whole_numbers
from conformance.spec.facts import Fact, check_fact, near, rows, unlike

NEEDS = (
    *("op:broadcast", "op:scatter", "op:all_reduce", "reduce_op:sum", "op:all_to_all_single"),
    *("op:all_gather_into_tensor", "op:reduce_scatter_tensor", "feature:coalescing"),
)

chapter = Chapter("dtensor", source="torch 2.13 docs, torch.distributed.tensor", needs=NEEDS)

FULL = "dtensor/meshes/full"
PLACED = (Replicate(), Shard(0), Shard(1))
LAYOUTS = tuple(itertools.product(PLACED, PLACED))
WITH_SUMS = tuple(itertools.product((*PLACED, Partial()), repeat=2))
SIZES = ((5, 4), (1, 2))


def distributed(me: Me) -> list[str]:
    mesh, found = mesh_of(me, 2, 2), []
    for size, layout in itertools.product(SIZES, LAYOUTS):
        mine = whole_numbers(size, 1 + me.rank).to(me.device)
        got = dt.distribute_tensor(mine, mesh, layout)
        found += unlike_placed(f"{size}, {layout}", got, whole_numbers(size, 1), layout)
    return found


def gathered(me: Me) -> list[str]:
    mesh, found = mesh_of(me, 2, 2), []
    for size, layout in itertools.product(SIZES, WITH_SUMS):
        whole = whole_numbers(size, 1)
        got = placed(whole, mesh, layout).full_tensor().cpu()
        found += unlike(f"{size}, {layout}", got + 0, whole + 0)
    return found


def lines_of_ranks(me: Me) -> list[str]:
    """Each line of the mesh along a dimension has a tensor of its own."""
    found = []
    for name, line in (("tp", me.rank // 2), ("dp", me.rank % 2)):
        mesh, whole = mesh_of(me, 2, 2)[name], whole_numbers((5, 3), line)
        for placement in PLACED:
            got = dt.distribute_tensor(whole.to(me.device), mesh, [placement])
            total: Any = got.sum()
            found += unlike(f"{name}, {placement}: sum", total.full_tensor().cpu(), whole.sum())
            found += unlike_placed(f"{name}, {placement}", got, whole, (placement,))
    return found


def strided(me: Me) -> list[str]:
    """Rows that were cut along the second dimension of the mesh first, and then along the first."""
    mesh, found = mesh_of(me, 2, 2), []
    outer, inner = mesh.get_coordinate() or (0, 0)
    layout = (_StridedShard(0, split_factor=2), Shard(0))
    for size in ((8, 3), (4, 2)):
        whole = whole_numbers(size, 1)
        mine = chunk_of(chunk_of(whole, 2, inner, 0), 2, outer, 0).contiguous().to(me.device)
        got = DTensor.from_local(mine, mesh, layout, shape=whole.shape, stride=whole.stride())
        found += unlike(f"{size}: whole", got.full_tensor().cpu(), whole)
        for target in (PLACED[:2], (Shard(0), Shard(0)), (Shard(1), Replicate())):
            moved = got.redistribute(placements=target)
            found += unlike_placed(f"{size}: to {target}", moved, whole, target)
    return found


FACTS = rows(
    (
        chapter.must(
            "dtensor/meshes/distribute",
            "On a mesh of two dimensions distribute_tensor cuts along the first, and then each "
            "part along the second, also twice along the same dimension of the tensor.",
        ),
        distributed,
    ),
    (
        chapter.must(
            "dtensor/meshes/full",
            "On a mesh of two dimensions full_tensor of any two placements, sums among them, is "
            "the whole tensor.",
        ),
        gathered,
    ),
    (
        chapter.must(
            "dtensor/meshes/lines-of-ranks",
            "Under one dimension of a mesh of two, each line of ranks has a tensor of its own.",
        ),
        lines_of_ranks,
    ),
    (
        chapter.must(
            "dtensor/meshes/strided",
            "A tensor whose rows were cut along the second dimension of the mesh first is put "
            "together in their order, and redistributed.",
            source="torch 2.13, torch.distributed.tensor.placement_types, _StridedShard",
            rests_on=FULL,
        ),
        strided,
    ),
)


@world_sizes(4)
@pytest.mark.parametrize("fact", FACTS)
def test_meshes(ranks: Ranks, fact: Fact) -> None:
    check_fact(ranks, fact)


KINDS: dict[str, Any] = {
    **{str(place): placement for place, placement in zip("R01", PLACED, strict=True)},
    **{op: Partial(op) for op in ("sum", "avg", "max")},
}
WHOLE = ("R", "0", "1")


def layout_of(names: Any) -> Any:
    return tuple(KINDS[name] for name in names)


def redistributed(me: Me, moves: Any) -> list[str]:
    """Along a mesh of two by three: there, and the gradient back, if there is one."""
    mesh, found = mesh_of(me, 2, 3), []
    everywhere = (Replicate(),) * 2
    for size, source, target in moves:
        whole, weight = whole_numbers(size, 1), whole_numbers(size, 2)
        x = placed(whole, mesh, layout_of(source)).requires_grad_()
        got = x.redistribute(placements=layout_of(target))
        what = f"{size}, {source} to {target}"
        found += unlike_placed(what, got, whole, layout_of(target))
        if {*source} <= {*WHOLE}:
            (got * placed(weight, mesh, everywhere)).sum().backward()
            grad: Any = x.grad
            found += unlike(f"{what}: gradient", grad.full_tensor().cpu() + 0, weight + 0)
    return found


layouts_drawn = st.tuples(st.sampled_from(WHOLE), st.sampled_from(WHOLE))
sources_drawn = st.one_of(
    layouts_drawn,
    st.sampled_from(["sum", "avg", "max"]).flatmap(
        lambda op: st.permutations([op, *WHOLE]).map(lambda names: (names[0], names[1]))
    ),
    st.sampled_from([("sum", "sum"), ("avg", "avg"), ("max", "max")]),
)
moves_drawn = st.tuples(
    st.tuples(st.integers(0, 9), st.integers(1, 7)), sources_drawn, layouts_drawn
)


@chapter.must(
    "dtensor/meshes/any-redistribution",
    "On a mesh of two dimensions a tensor of any size is redistributed from shards, replicas, "
    "sums, averages and extremes to shards and replicas, and gradients go back.",
    needs=(*NEEDS, "reduce_op:avg", "reduce_op:max"),
    rests_on=(FULL, "dtensor/redistribute/uneven"),
)
@world_sizes(6)
@settings(max_examples=2)
@given(st.lists(moves_drawn, min_size=7, max_size=7))
def test_any_redistribution(ranks: Ranks, moves: Any) -> None:
    check_fact(ranks, redistributed, moves)


def flattened_and_back(x: Any) -> Any:
    """A matrix as a row of numbers, and as a matrix again.

    torch may refuse to flatten shards of unequal sizes, and to make a matrix again of shards of
    shards; these are gathered before.
    """
    if isinstance(x, DTensor):
        shards = [
            (placement.dim, count)
            for placement, count in zip(x.placements, x.device_mesh.shape, strict=True)
            if isinstance(placement, Shard | _StridedShard)
        ]
        is_even = all(x.size(dim) % count == 0 for dim, count in shards)
        if not is_even or len(dict(shards)) < len(shards):
            x = x.redistribute(placements=(Replicate(),) * len(x.placements))
    return x.reshape(-1).reshape(x.shape)


STEPS: dict[str, Any] = {
    "double": lambda x: x * 2,
    "relu": lambda x: x.relu(),
    "turn": lambda x: x.t(),
    "add its sum": lambda x: x + x.sum(0, keepdim=True),
    "subtract its mean": lambda x: x - x.mean(1, keepdim=True),
    "softmax": lambda x: x.softmax(0),
    "halve": lambda x: x[: x.size(0) // 2 + 1],
    "join": lambda x: torch.cat([x, x + 1], 1)[:, :6],
    "multiply": lambda x: x @ x.t() / 16,
    "flatten and back": flattened_and_back,
}


def program(me: Me, size: Any, layout: Any, steps: Any) -> list[str]:
    """Steps are names of operators, and layouts; then the gradient of a weighted sum."""
    mesh = mesh_of(me, 2, 2)
    given_ = whole_numbers(size, 1).requires_grad_()
    start = placed(given_.detach(), mesh, layout_of(layout)).requires_grad_()
    whole: Any = given_
    x: Any = start
    for step in steps:
        if isinstance(step, str):
            whole, x = STEPS[step](whole), STEPS[step](x)
        else:
            x = x.redistribute(placements=layout_of(step))
    weight = whole_numbers(whole.shape, 2)
    (whole * weight).sum().backward()
    (x * placed(weight, mesh, (Replicate(),) * 2)).sum().backward()
    grad: Any = start.grad
    assert given_.grad is not None
    return near("result", x.full_tensor(), whole, 1e-4) + near(
        "gradient", grad.full_tensor(), given_.grad, 1e-4
    )


@chapter.must(
    "dtensor/meshes/any-program",
    "Any sequence of operators and redistributions of a matrix on a mesh of two dimensions has "
    "the numbers and the gradient of the whole matrix.",
    needs=(*NEEDS, "reduce_op:avg"),
    rests_on=(FULL, "dtensor/redistribute/uneven"),
)
@world_sizes(4)
@settings(max_examples=5)
@given(
    st.tuples(st.integers(2, 6), st.integers(2, 6)),
    layouts_drawn,
    st.lists(st.one_of(st.sampled_from([*STEPS]), layouts_drawn), min_size=2, max_size=6),
)
def test_any_program(ranks: Ranks, size: Any, layout: Any, steps: Any) -> None:
    check_fact(ranks, program, size, layout, steps)


def ones(me: Me, layout: Any) -> Any:
    return placed(torch.ones(4, 6), mesh_of(me, 2, 2), layout)


RANDOM_LAYOUTS = (
    (PLACED[0], PLACED[0]),
    (PLACED[1], PLACED[0]),
    (PLACED[0], PLACED[2]),
    PLACED[1:],
)
RANDOM: dict[str, Any] = {
    "uniform_": lambda x: x.uniform_(),
    "normal_": lambda x: x.normal_(),
    "rand_like": torch.rand_like,
    "dropout": lambda x: torch.nn.functional.dropout(x, 0.5),
    "bernoulli": lambda x: (x * 0.5).bernoulli(),
    "init": torch.nn.init.kaiming_uniform_,
}
SPREAD = ("uniform_", "normal_", "rand_like", "init")  # two numbers are hardly ever the same


def drawn(call: Any, x: Any, seed: int = 7) -> Any:
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of devices on which this may be incomplete
        return call(x)


def replicas_drawn(me: Me) -> list[str]:
    """The sum of a part's replicas is as many times the part."""
    found = []
    for layout in RANDOM_LAYOUTS:
        for name, call in RANDOM.items():
            got = drawn(call, ones(me, layout))
            local = got.to_local().detach()
            shares = [Partial() if p.is_replicate() else p for p in got.placements]
            summed: Any = DTensor.from_local(local, got.device_mesh, shares)
            total = summed.redistribute(placements=got.placements).to_local()
            copies = 2 ** sum(p.is_replicate() for p in got.placements)
            found += unlike(f"{name}, {layout}", total.cpu(), local.cpu() * copies)
    return found


def drawn_again(me: Me) -> list[str]:
    """The same after the same seed, and others in the next call and after another seed."""
    found = []
    for name in SPREAD:
        call = RANDOM[name]
        first = drawn(call, ones(me, (Shard(0), Replicate()))).full_tensor()
        following = call(ones(me, (Shard(0), Replicate()))).full_tensor()
        again = drawn(call, ones(me, (Shard(0), Replicate()))).full_tensor()
        another = drawn(call, ones(me, (Shard(0), Replicate())), 8).full_tensor()
        found += unlike(f"{name}: again", again, first)
        same = [bool((one == first).any()) for one in (following, another)]
        found += unlike(f"{name}: whether numbers came again", same, [False, False])
    return found


def shards_drawn(me: Me) -> list[str]:
    """No number comes twice in the whole tensor."""
    found = []
    for layout in RANDOM_LAYOUTS:
        for name in SPREAD:
            whole = drawn(RANDOM[name], ones(me, layout)).full_tensor()
            found += unlike(f"{name}, {layout}: different numbers", len(whole.unique()), 24)
    return found


def factories_drawn(me: Me) -> list[str]:
    """rand and randn, in parts of the sizes of any other tensor's."""
    found = []
    for layout in RANDOM_LAYOUTS:
        for make in (dt.rand, dt.randn):
            how: Any = {"device_mesh": mesh_of(me, 2, 2), "placements": layout}
            torch.manual_seed(7)
            got = make(4, 6, **how)
            found += unlike(f"{layout}: size", tuple(got.shape), (4, 6))
            found += unlike(f"{layout}: numbers", len(got.full_tensor().unique()), 24)
    return found


RANDOM_FACTS = rows(
    (
        chapter.must(
            "dtensor/random/replicas",
            "After the same seed on all ranks, random operators and dropout give all replicas of "
            "a part the same numbers.",
        ),
        replicas_drawn,
    ),
    (
        chapter.must(
            "dtensor/random/repeated",
            "The same seed gives a DTensor the same random numbers again; the next call and "
            "another seed give it others.",
        ),
        drawn_again,
    ),
    (
        chapter.must(
            "dtensor/random/shards",
            "Different shards of a DTensor get different random numbers.",
            source="torch 2.13, torch.distributed.tensor._random",
            rests_on="dtensor/random/replicas",
        ),
        shards_drawn,
    ),
    (
        chapter.must(
            "dtensor/random/factories",
            "rand and randn make DTensors in each layout.",
            rests_on="dtensor/random/replicas",
        ),
        factories_drawn,
    ),
)


@not_probed()
@world_sizes(4)
@pytest.mark.parametrize("fact", RANDOM_FACTS)
def test_random(ranks: Ranks, fact: Fact) -> None:
    check_fact(ranks, fact)

"""Dividing the world: new_subgroups, new_subgroups_by_enumeration, split_group, device meshes."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from conformance import Chapter, Me, Ranks, assert_each_rank, deadline, not_probed, world_sizes
from conformance.spec.groups.membership_sums import sum_marks, sum_of_marks
from conformance.spec.groups.starting import start
from conformance.spec.waiting import all_are_here

C10D = "torch/distributed/distributed_c10d.py of torch 2.13"

chapter = Chapter("groups")


def divide(me: Me, sizes: list[int]) -> list[tuple[Tensor, int, bool]]:
    """For each size: the sum in this rank's part, how many parts, whether this one is of them."""
    seen = []
    for size in sizes:
        own, parts = dist.new_subgroups(group_size=size)
        seen.append((sum_marks(me, own), len(parts), own in parts))
    return seen


@chapter.must(
    "new_subgroups/equal-parts",
    "new_subgroups divides the world into consecutive groups of one size, and returns this "
    "rank's group and the list of all groups.",
    source="torch 2.13 docs, new_subgroups",
    rests_on="new_group/members",
)
@world_sizes(1, 2, 3, 4, at_least=1)
def test_the_world_is_divided_into_equal_parts(ranks: Ranks) -> None:
    n = ranks.world_size
    sizes = [size for size in range(1, n + 1) if n % size == 0]
    want = []
    for rank in range(n):
        firsts = [rank // size * size for size in sizes]
        parts = [range(first, first + size) for first, size in zip(firsts, sizes, strict=True)]
        want.append([(sum_of_marks(part), n // len(part), True) for part in parts])
    assert_each_rank(ranks.run(divide, sizes), want)


def divide_badly(me: Me) -> None:
    for size, words in ((0, "positive"), (me.world_size + 1, "must not exceed"), (2, "divisible")):
        with pytest.raises(ValueError, match=words):
            dist.new_subgroups(group_size=size)


@chapter.must(
    "new_subgroups/arguments",
    "A size that is not positive, exceeds the world or does not divide it raises a ValueError.",
    source=f"{C10D}, new_subgroups",
)
@world_sizes(3)
def test_unequal_parts_are_refused(ranks: Ranks) -> None:
    ranks.run(divide_badly)


def divide_the_last_two(me: Me) -> list[Any]:
    """For parts of one and of two ranks: the ranks of this one's part, the sum in it, how many."""
    members = [me.world_size - 2, me.world_size - 1]
    pair = dist.new_group(members)
    seen: list[Any] = []
    for size in (1, 2) if me.rank in members else ():
        own, parts = dist.new_subgroups(group_size=size, group=pair)
        ranks = None if own is None else dist.get_process_group_ranks(own)
        seen.append((ranks, None if own is None else sum_marks(me, own), len(parts)))
    return seen


@chapter.must(
    "new_subgroups/of-a-group",
    "With a group, new_subgroups divides its ranks, and not as many ranks of the world.",
    source="torch 2.13 docs, new_subgroups, argument group",
    rests_on="new_subgroups/equal-parts",
)
@world_sizes(4)
def test_a_group_is_divided(ranks: Ranks) -> None:
    pair = ([2, 3], sum_of_marks([2, 3]), 1)
    want = [[([rank], sum_of_marks([rank]), 2), pair] for rank in (2, 3)]
    assert_each_rank(ranks.run(divide_the_last_two), [[], [], *want])


def enumerate_parts(me: Me, lists: list[list[int]]) -> tuple[Tensor | None, int]:
    own, parts = dist.new_subgroups_by_enumeration(lists)
    return (None if own is None else sum_marks(me, own)), len(parts)


@chapter.must(
    "new_subgroups_by_enumeration/parts",
    "new_subgroups_by_enumeration makes one group for each list; a rank in none of them gets None.",
    source="torch 2.13 docs, new_subgroups_by_enumeration",
    rests_on="new_group/members",
)
@world_sizes(3, 4)
def test_each_list_makes_a_group(ranks: Ranks) -> None:
    got = ranks.run(enumerate_parts, [[0, 2], [1]])
    pair, alone = sum_of_marks([0, 2]), sum_of_marks([1])
    want = [(pair, 2), (alone, 2), (pair, 2), (None, 2)]
    assert_each_rank(got, want[: ranks.world_size])


def enumerate_badly(me: Me) -> None:
    wrong: list[tuple[Any, str]] = [
        ([], "empty"),
        (None, "empty"),
        ([[0, 1], [1]], "both subgroup"),
    ]
    for lists, words in wrong:
        with pytest.raises(ValueError, match=words):
            dist.new_subgroups_by_enumeration(lists)


@chapter.must(
    "new_subgroups_by_enumeration/arguments",
    "An empty list of lists raises a ValueError, and so does a rank in two lists.",
    source=f"{C10D}, new_subgroups_by_enumeration",
)
@world_sizes(2, 3)
def test_bad_lists_are_refused(ranks: Ranks) -> None:
    ranks.run(enumerate_badly)


def split_the_world(me: Me, times_before: int) -> tuple[Tensor, int, int] | None:
    """Split off the first and the last rank, after the default group was made several times."""
    for number in range(times_before + 1):
        start(me, f"time {number}")
        if number < times_before:
            all_are_here(me, f"group {number} is made")  # none may leave it while others connect
            dist.destroy_process_group()
    world: Any = dist.group.WORLD
    members = [0, me.world_size - 1]
    group = world.split_group(members, timedelta(seconds=60), group_name="ends", group_desc="ends")
    if group is None:
        return None
    x = sum_of_marks([me.rank]).to(me.device)
    group.allreduce([x]).wait()
    return x, group.rank(), group.size()


@not_probed()
@chapter.should(
    "split_group/parts",
    "split_group of a group makes a group of the given group ranks for its members, and None "
    "for the others.",
    source="torch 2.13, ProcessGroup.split_group",
    needs="feature:split_group",
    rests_on="all_reduce/sum",
)
@world_sizes(2, 3, 4, at_least=2)
@deadline(20)
@pytest.mark.parametrize("times_before", [0, 1], ids=["at first", "later"])
def test_a_group_is_split(bare_ranks: Ranks, times_before: int) -> None:
    n = bare_ranks.world_size
    got = bare_ranks.run(split_the_world, times_before)
    total = sum_of_marks([0, n - 1])
    inner: list[Any] = [None] * (n - 2)
    assert_each_rank(got, [(total, 0, 2), *inner, (total, 1, 2)])


def split_badly(me: Me) -> None:
    with pytest.raises(ValueError, match="None or empty"):
        dist.split_group(split_ranks=[])
    if me.device.type == "cpu":
        with pytest.raises(RuntimeError, match="not safe to split"):
            dist.split_group(split_ranks=[[0]])


@chapter.must(
    "split_group/arguments",
    "dist.split_group without ranks raises a ValueError; where no device is bound to the "
    "default group it raises a RuntimeError.",
    source=f"{C10D}, split_group",
)
@world_sizes(1, 2)
def test_splitting_without_ranks_is_refused(ranks: Ranks) -> None:
    ranks.run(split_badly)


def _mesh(me: Me) -> DeviceMesh:
    """Two rows, or as many ranks as there are in one row."""
    shape = (2, me.world_size // 2) if me.world_size % 2 == 0 else (1, me.world_size)
    return init_device_mesh(me.device.type, shape, mesh_dim_names=("rows", "columns"))


def _coordinates(rank: int, world_size: int) -> tuple[int, int]:
    columns = world_size // 2 if world_size % 2 == 0 else world_size
    return rank // columns, rank % columns


def use_a_mesh(me: Me) -> list[Any]:
    """For each dimension: the ranks of its group, this rank's number in it, the sum of marks."""
    mesh = _mesh(me)
    seen: list[Any] = [tuple(mesh.get_coordinate() or ())]
    for name in ("rows", "columns"):
        group = mesh.get_group(name)
        seen.append(
            [dist.get_process_group_ranks(group), mesh.get_local_rank(name), sum_marks(me, group)]
        )
    return seen


def _peers(rank: int, world_size: int, dimension: int) -> list[int]:
    """The ranks whose other coordinate is this rank's."""
    mine = _coordinates(rank, world_size)[1 - dimension]
    return [r for r in range(world_size) if _coordinates(r, world_size)[1 - dimension] == mine]


@chapter.must(
    "device_mesh/dimensions",
    "Each dimension of a mesh has a group of the ranks that differ only in this coordinate.",
    source="torch 2.13 docs, init_device_mesh and DeviceMesh.get_group",
    rests_on="new_group/members",
)
@world_sizes(1, 2, 3, 4, at_least=1)
def test_each_dimension_of_a_mesh_has_its_groups(ranks: Ranks) -> None:
    n = ranks.world_size
    want = []
    for rank in range(n):
        of_both: list[Any] = [_coordinates(rank, n)]
        for dimension in (0, 1):
            peers = _peers(rank, n, dimension)
            of_both.append([peers, peers.index(rank), sum_of_marks(peers)])
        want.append(of_both)
    assert_each_rank(ranks.run(use_a_mesh), want)


def slice_a_mesh(me: Me) -> list[Any]:
    mesh = _mesh(me)
    columns = mesh["columns"].get_group()
    world = dist.group.WORLD
    assert world is not None
    of_world = DeviceMesh.from_group(world, me.device.type)
    return [
        dist.get_process_group_ranks(columns),
        columns is mesh.get_group("columns"),
        of_world.get_group() is world,
        of_world.mesh.tolist(),
    ]


@chapter.must(
    "device_mesh/slices",
    "A slice of a mesh by name has the group of its dimension, and a one-dimensional mesh of a "
    "group has that group.",
    source="torch 2.13 docs, DeviceMesh.__getitem__ and DeviceMesh.from_group",
    rests_on="device_mesh/dimensions",
)
@world_sizes(2, 4)
def test_slices_of_a_mesh_and_meshes_of_groups(ranks: Ranks) -> None:
    n = ranks.world_size
    want = [[_peers(rank, n, 1), True, True, list(range(n))] for rank in range(n)]
    assert_each_rank(ranks.run(slice_a_mesh), want)


def make_bad_meshes(me: Me) -> None:
    kind, n = me.device.type, me.world_size
    with pytest.raises(RuntimeError, match=r"(?i)mesh.*world size"):
        init_device_mesh(kind, (n + 1,))
    for names in (("a",), ("a", "a")):
        with pytest.raises(RuntimeError, match="mesh_dim_name"):
            init_device_mesh(kind, (1, n), mesh_dim_names=names)
    with pytest.raises(KeyError, match="Invalid mesh_dim_name"):
        _mesh(me)["nowhere"]


@chapter.must(
    "device_mesh/arguments",
    "A mesh larger than the world, names that repeat or are too few, and an unknown name, raise.",
    source="torch/distributed/device_mesh.py of torch 2.13",
)
@world_sizes(1, 2)
def test_bad_meshes_are_refused(ranks: Ranks) -> None:
    ranks.run(make_bad_meshes)

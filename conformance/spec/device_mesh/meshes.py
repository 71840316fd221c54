"""DeviceMesh: shapes, names, sub-meshes, and the groups of its lines."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import device_mesh
from torch.distributed.device_mesh import DeviceMesh

from conformance import Chapter, Me, Ranks, world_sizes
from conformance.spec.facts import Fact, check_fact, rows, unlike

DOCS = "torch 2.13 docs, torch.distributed.device_mesh"

chapter = Chapter("device_mesh", source=DOCS)

NAMES = ("rows", "columns")


def mesh_of(me: Me) -> DeviceMesh:
    """Four ranks, two by two: 0 1 in the first row, 2 3 in the second."""
    return device_mesh.init_device_mesh(me.device.type, (2, 2), mesh_dim_names=NAMES)


def members(group: Any) -> list[int]:
    return dist.get_process_group_ranks(group)


def own_lines(me: Me) -> tuple[list[int], list[int]]:
    """The ranks of this rank's column and of its row."""
    return [me.rank % 2, me.rank % 2 + 2], [me.rank // 2 * 2, me.rank // 2 * 2 + 1]


def raised(call: Any, *kinds: type[Exception]) -> str:
    """The exception's type, if it is one of these; what happened otherwise."""
    try:
        call()
    except kinds as error:
        return type(error).__name__
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def shape(me: Me) -> list[str]:
    mesh = mesh_of(me)
    seen = mesh.ndim, tuple(mesh.shape), mesh.size(), mesh.size(1), mesh.mesh.tolist()
    return unlike("ndim, shape, sizes, ranks", seen, (2, (2, 2), 4, 2, [[0, 1], [2, 3]]))


def names(me: Me) -> list[str]:
    named, bare = mesh_of(me), device_mesh.init_device_mesh(me.device.type, (4,))
    return unlike("names", (named.mesh_dim_names, bare.mesh_dim_names), (NAMES, None))


def device_type(me: Me) -> list[str]:
    return unlike("type", mesh_of(me).device_type, me.device.type)


def coordinate(me: Me) -> list[str]:
    place: Any = mesh_of(me).get_coordinate()
    return unlike("coordinate", list(place), [me.rank // 2, me.rank % 2])


def local_ranks(me: Me) -> list[str]:
    mesh = mesh_of(me)
    seen = [mesh.get_local_rank(which) for which in (0, 1, "rows", "columns")]
    return unlike("local ranks", seen, [me.rank // 2, me.rank % 2] * 2)


def global_rank(me: Me) -> list[str]:
    return unlike("rank", mesh_of(me).get_rank(), me.rank)


def groups(me: Me) -> list[str]:
    mesh = mesh_of(me)
    seen = [members(mesh.get_group(which)) for which in (0, 1, "rows", "columns")]
    return unlike("ranks of the groups", seen, [*own_lines(me)] * 2)


def all_groups(me: Me) -> list[str]:
    seen = [members(group) for group in mesh_of(me).get_all_groups()]
    return unlike("ranks of all groups", seen, list(own_lines(me)))


def same_groups(me: Me) -> list[str]:
    """Asked for by number, by name, and of the sub-mesh."""
    mesh = mesh_of(me)
    first = mesh.get_group("columns")
    same = [g is first for g in (mesh.get_group(1), mesh["columns"].get_group())]
    return unlike("the same group", same, [True, True])


def sums(me: Me) -> list[str]:
    mesh, seen = mesh_of(me), []
    for group in mesh.get_all_groups():
        x = torch.full((1,), float(me.rank), device=me.device)
        dist.all_reduce(x, group=group)
        seen.append(x.item())
    return unlike("sums", seen, [float(sum(line)) for line in own_lines(me)])


def sub_mesh(me: Me) -> list[str]:
    part = mesh_of(me)["columns"]
    seen = part.ndim, part.mesh.tolist(), part.mesh_dim_names, part.get_local_rank()
    return unlike("sub-mesh", seen, (1, own_lines(me)[1], ("columns",), me.rank % 2))


def several_names(me: Me) -> list[str]:
    mesh = device_mesh.init_device_mesh(me.device.type, (2, 1, 2), mesh_dim_names=("a", "b", "c"))
    part = mesh["a", "c"]
    seen = part.mesh.tolist(), part.mesh_dim_names
    found = unlike("sub-mesh", seen, ([[0, 1], [2, 3]], ("a", "c")))
    places = [part.get_local_rank(which) for which in (0, 1, "a", "c")]
    return found + unlike("local ranks", places, [me.rank // 2, me.rank % 2] * 2)


def names_in_another_order(me: Me) -> list[str]:
    """Right or refused; never the mesh's own order."""
    mesh = device_mesh.init_device_mesh(me.device.type, (2, 1, 2), mesh_dim_names=("a", "b", "c"))
    try:
        part = mesh["c", "a"]
    except KeyError:
        return []
    seen = part.mesh.tolist(), part.mesh_dim_names
    return unlike("mesh['c', 'a']", seen, ([[0, 2], [1, 3]], ("c", "a")))


def flattened(me: Me) -> list[str]:
    mesh = mesh_of(me)
    flat = mesh._flatten("all")
    seen = flat.ndim, flat.mesh.tolist(), members(flat.get_group())
    found = unlike("flattened", seen, (1, [0, 1, 2, 3], [0, 1, 2, 3]))
    return found + unlike("by its name", mesh["all"].mesh.tolist(), [0, 1, 2, 3])


def flattened_twice(me: Me) -> list[str]:
    mesh = mesh_of(me)
    both = mesh._flatten("all"), mesh._flatten("all")
    return unlike("the same group", both[0].get_group() is both[1].get_group(), True)


def any_order(me: Me) -> list[str]:
    """A mesh of ranks in another order than theirs."""
    mesh = DeviceMesh(me.device.type, [[3, 1], [2, 0]], mesh_dim_names=NAMES)
    line = [3, 1] if me.rank in (1, 3) else [2, 0]
    place: Any = mesh.get_coordinate()
    seen = mesh["columns"].mesh.tolist(), place[1]
    found = unlike("line and place in it", seen, (line, line.index(me.rank)))
    return found + unlike("its group", sorted(members(mesh.get_group("columns"))), sorted(line))


def some_ranks(me: Me) -> list[str]:
    """Ranks 0 and 2 alone are in the mesh."""
    mesh = DeviceMesh(me.device.type, [0, 2])
    place = mesh.get_coordinate()
    want = [me.rank // 2] if me.rank % 2 == 0 else None
    return unlike("coordinate", None if place is None else list(place), want)


def sum_of_some(me: Me) -> list[str]:
    mesh = DeviceMesh(me.device.type, [0, 2])
    x = torch.full((1,), float(me.rank), device=me.device)
    if mesh.get_coordinate() is not None:
        dist.all_reduce(x, group=mesh.get_group())
    return unlike("sum", x.item(), 2.0 if me.rank % 2 == 0 else float(me.rank))


def of_a_group(me: Me) -> list[str]:
    group = dist.new_group()
    mesh = DeviceMesh.from_group(group, me.device.type)
    seen = mesh.mesh.tolist(), mesh.get_group() is group
    return unlike("ranks, same group", seen, ([0, 1, 2, 3], True))


def of_groups(me: Me) -> list[str]:
    made = [[dist.new_group([0, 2]), dist.new_group([1, 3])][me.rank % 2]]
    made.append([dist.new_group([0, 1]), dist.new_group([2, 3])][me.rank // 2])
    ranks = torch.arange(4).view(2, 2)
    mesh = DeviceMesh.from_group(made, me.device.type, mesh=ranks, mesh_dim_names=NAMES)
    same = [mesh.get_group(i) is made[i] for i in range(2)]
    return unlike("the same groups", same, [True, True])


def of_wrong_groups(me: Me) -> list[str]:
    kind, pair = me.device.type, dist.new_group([0, 1])
    if me.rank > 1:
        return []

    def made(groups: Any, ranks: Any) -> Any:
        return lambda: DeviceMesh.from_group(groups, kind, mesh=ranks, mesh_dim_names=NAMES)

    tried = {
        "other ranks than the group's": lambda: DeviceMesh.from_group(pair, kind, mesh=[2, 3]),
        "a tensor of other ranks": lambda: DeviceMesh.from_group(pair, kind, mesh=torch.arange(4)),
        "one dimension of two groups": made([pair, pair], [0, 1]),
        "two dimensions of one group": made([pair], [[0, 1]]),
        "no group": made([], [0]),
    }
    seen = {what: raised(call, ValueError) for what, call in tried.items()}
    return unlike("from_group", seen, dict.fromkeys(tried, "ValueError"))


def equal(me: Me) -> list[str]:
    one, other = mesh_of(me), mesh_of(me)
    turned = DeviceMesh(me.device.type, [[0, 2], [1, 3]], mesh_dim_names=NAMES)
    bare = device_mesh.init_device_mesh(me.device.type, (2, 2))
    seen = one == other, hash(one) == hash(other), one == turned, one == bare
    want = True, True, False, False
    return unlike("equal, of one hash, equal to another one, to one without names", seen, want)


def unknown_name(me: Me) -> list[str]:
    mesh = mesh_of(me)
    return unlike("mesh['depth']", raised(lambda: mesh["depth"], KeyError), "KeyError")


def no_dimension(me: Me) -> list[str]:
    mesh = mesh_of(me)
    return unlike("get_group()", raised(mesh.get_group, RuntimeError), "RuntimeError")


def same_name_twice(me: Me) -> list[str]:
    def make() -> None:
        device_mesh.init_device_mesh(me.device.type, (2, 2), mesh_dim_names=("a", "a"))

    return unlike("two of one name", raised(make, RuntimeError), "RuntimeError")


def too_few_names(me: Me) -> list[str]:
    def make() -> None:
        device_mesh.init_device_mesh(me.device.type, (2, 2), mesh_dim_names=("a",))

    return unlike("one name for two", raised(make, RuntimeError), "RuntimeError")


def too_many_ranks(me: Me) -> list[str]:
    def make() -> None:
        device_mesh.init_device_mesh(me.device.type, (3, 2))

    kinds = RuntimeError, ValueError
    seen = raised(make, *kinds)
    return unlike("six ranks of four", seen in [kind.__name__ for kind in kinds], True)


FACTS = rows(
    (
        chapter.must(
            "device_mesh/shape",
            "init_device_mesh lays the ranks out in the shape, the last dimension fastest.",
        ),
        shape,
    ),
    (
        chapter.must("device_mesh/names", "A mesh has the names of its dimensions, or none."),
        names,
    ),
    (
        chapter.must(
            "device_mesh/device-type", "A mesh has the device type that it was made with."
        ),
        device_type,
    ),
    (
        chapter.must(
            "device_mesh/coordinate",
            "get_coordinate gives the place of this rank in each dimension.",
        ),
        coordinate,
    ),
    (
        chapter.must(
            "device_mesh/local-rank",
            "get_local_rank gives the place of this rank in a dimension, by number or by name.",
        ),
        local_ranks,
    ),
    (
        chapter.must("device_mesh/global-rank", "get_rank gives the global rank."),
        global_rank,
    ),
    (
        chapter.must(
            "device_mesh/groups",
            "get_group gives the group of the ranks that differ from this one in that dimension "
            "alone, by number or by name.",
        ),
        groups,
    ),
    (
        chapter.must(
            "device_mesh/all-groups",
            "get_all_groups gives the group of each dimension, in order.",
            rests_on="device_mesh/groups",
        ),
        all_groups,
    ),
    (
        chapter.must(
            "device_mesh/groups-made-once",
            "A dimension has one group, whether it is asked for by number, by name or of a "
            "sub-mesh.",
            source="observed, torch 2.13.0",
        ),
        same_groups,
    ),
    (
        chapter.must(
            "device_mesh/collectives",
            "A collective in a dimension's group is among its ranks.",
            needs=("op:all_reduce", "reduce_op:sum"),
            rests_on="device_mesh/groups",
        ),
        sums,
    ),
    (
        chapter.must(
            "device_mesh/sub-mesh",
            "The mesh of one name is the line of this rank in that dimension.",
        ),
        sub_mesh,
    ),
    (
        chapter.must(
            "device_mesh/several-names",
            "The mesh of several names has these dimensions, of the ranks that differ from this "
            "one in them alone.",
        ),
        several_names,
    ),
    (
        chapter.must(
            "device_mesh/names-in-another-order",
            "Names in another order than the mesh has them give dimensions in their order, or "
            "raise a KeyError.",
            source="torch 2.13 docs, DeviceMesh.__getitem__; observed, KeyError",
            rests_on="device_mesh/several-names",
        ),
        names_in_another_order,
    ),
    (
        chapter.must(
            "device_mesh/flattened",
            "A flattened mesh has one dimension and a group of all of the mesh's ranks, and is "
            "found by its name.",
            source="torch 2.13, DeviceMesh._flatten",
        ),
        flattened,
    ),
    (
        chapter.must(
            "device_mesh/flattened-once",
            "A mesh that is flattened twice has one group for both.",
            source="torch 2.13, DeviceMesh._flatten",
        ),
        flattened_twice,
    ),
    (
        chapter.must(
            "device_mesh/any-order",
            "The ranks of a mesh may be in any order.",
        ),
        any_order,
    ),
    (
        chapter.must(
            "device_mesh/some-ranks",
            "A mesh may be of some ranks alone; the others have no coordinate in it.",
        ),
        some_ranks,
    ),
    (
        chapter.must(
            "device_mesh/sum-of-some",
            "A collective in a mesh of some ranks leaves the others alone.",
            needs=("op:all_reduce", "reduce_op:sum"),
        ),
        sum_of_some,
    ),
    (
        chapter.must(
            "device_mesh/from-group",
            "A mesh that is made from a group has its ranks and uses it.",
        ),
        of_a_group,
    ),
    (
        chapter.must(
            "device_mesh/from-groups",
            "A mesh that is made from several groups uses each of them.",
        ),
        of_groups,
    ),
    (
        chapter.must(
            "device_mesh/from-wrong-groups",
            "from_group raises a ValueError if the ranks are not those of the group, and if there "
            "are not as many groups as dimensions.",
            source="torch 2.13 docs, DeviceMesh.from_group",
        ),
        of_wrong_groups,
    ),
    (
        chapter.must(
            "device_mesh/equality",
            "Meshes of the same ranks in the same places and of the same names are equal and have "
            "one hash, and others are not.",
            source="torch 2.13, DeviceMesh.__eq__",
        ),
        equal,
    ),
    (
        chapter.must("device_mesh/unknown-name", "A name that no dimension has raises a KeyError."),
        unknown_name,
    ),
    (
        chapter.must(
            "device_mesh/no-dimension",
            "get_group without a dimension raises a RuntimeError on a mesh of several.",
        ),
        no_dimension,
    ),
    (
        chapter.must(
            "device_mesh/same-name-twice",
            "Two dimensions of one name raise a RuntimeError.",
        ),
        same_name_twice,
    ),
    (
        chapter.must(
            "device_mesh/too-few-names",
            "Fewer names than there are dimensions raise a RuntimeError.",
        ),
        too_few_names,
    ),
    (
        chapter.must(
            "device_mesh/too-many-ranks",
            "A mesh of more ranks than there are is refused.",
        ),
        too_many_ranks,
    ),
)


@world_sizes(4)
@pytest.mark.parametrize("fact", FACTS)
def test_meshes(ranks: Ranks, fact: Fact) -> None:
    check_fact(ranks, fact)

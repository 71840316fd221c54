"""gather_object, broadcast_object_list and scatter_object_list: results, roots, wrong lists."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from conformance import (
    Chapter,
    Me,
    Ranks,
    assert_each_rank,
    assert_same_on_all_ranks,
    covers,
    deadline,
    needs,
    not_probed,
    world_sizes,
)
from conformance.spec.raising import assert_raised

C10D = "torch/distributed/distributed_c10d.py of torch 2.13"

chapter = Chapter("objects")


def _padding(rank: int) -> int:
    """Neither the first nor the last rank's object is the largest or the smallest."""
    return (1000, 5000, 2000, 0, 3000)[rank % 5]


def gather_at(me: Me, dst: int | None) -> list[Any] | None:
    """Objects of very different sizes to rank `dst`; None leaves the argument out."""
    here = me.rank == (dst or 0)
    got: list[Any] | None = ["before"] * me.world_size if here else None
    if dst is None:
        dist.gather_object({"of": me.rank, "pad": "x" * _padding(me.rank)}, got)
    else:
        dist.gather_object({"of": me.rank, "pad": "x" * _padding(me.rank)}, got, dst=dst)
    return got


@chapter.must(
    "gather_object/gathers",
    "gather_object leaves the object of group rank i at index i of the destination's list; "
    "other ranks pass None.",
    source="torch 2.13 docs, gather_object",
    needs=("op:all_gather", "op:gather", "dtype:uint8", "dtype:int64"),
)
@world_sizes(1, 2, 3, 5, at_least=1)
@pytest.mark.parametrize("root", ["default", "last"])
def test_the_destination_has_every_object(ranks: Ranks, root: str) -> None:
    n = ranks.world_size
    dst = None if root == "default" else n - 1
    want = [{"of": rank, "pad": "x" * _padding(rank)} for rank in range(n)]
    got = ranks.run(gather_at, dst)
    assert_each_rank(got, [want if rank == (dst or 0) else None for rank in range(n)])


_SEVERAL_MIB = 5 << 20


def gather_large(me: Me) -> list[tuple[int, set[int]]]:
    """Sizes of the gathered objects, and of which bytes they consist; [] elsewhere."""
    got: list[Any] = [b""] * me.world_size
    dist.gather_object(bytes([me.rank + 1]) * _SEVERAL_MIB, got if me.rank == 0 else None)
    return [(len(found), set(found)) for found in got] if me.rank == 0 else []


@chapter.must(
    "gather_object/large",
    "gather_object brings objects of several mebibytes whole.",
    source="derived: metadata of a checkpoint",
    needs=("op:all_gather", "op:gather", "dtype:uint8", "dtype:int64"),
    rests_on="gather_object/gathers",
)
@world_sizes(2, 3)
def test_large_objects_arrive_whole(ranks: Ranks) -> None:
    want = [(_SEVERAL_MIB, {rank + 1}) for rank in range(ranks.world_size)]
    assert_each_rank(ranks.run(gather_large), [want] + [[]] * (ranks.world_size - 1))


def gather_with_wrong_lists(me: Me) -> None:
    """Every call is refused before anything is sent, so no rank waits for another."""
    if me.rank == 0:
        with pytest.raises(ValueError, match="must be specified on destination rank"):
            dist.gather_object(1, None, dst=0)
    else:
        with pytest.raises(ValueError, match="must NOT be specified on non-destination ranks"):
            dist.gather_object(1, [None] * me.world_size, dst=0)


@chapter.must(
    "gather_object/arguments",
    "The destination raises a ValueError without a list, and any other rank raises one with a "
    "list.",
    source=f"{C10D}, gather_object",
)
@world_sizes(1, 2, 3)
def test_only_the_destination_passes_a_list(ranks: Ranks) -> None:
    ranks.run(gather_with_wrong_lists)


def broadcast_from(me: Me, src: int | None, by_device: bool) -> list[Any]:
    """Objects of rank `src`; None leaves the argument out. by_device: name the rank's device."""
    told: list[Any] = [{"from": me.rank}, None, "y" * (5000 * me.rank), [me.rank] * me.rank]
    arguments: dict[str, Any] = {} if src is None else {"src": src}
    if by_device:
        arguments["device"] = me.device
    dist.broadcast_object_list(told, **arguments)
    return told


def _told_by(rank: int) -> list[Any]:
    return [{"from": rank}, None, "y" * (5000 * rank), [rank] * rank]


@chapter.must(
    "broadcast_object_list/broadcasts",
    "broadcast_object_list replaces every entry of the other ranks' lists by the source's.",
    source="torch 2.13 docs, broadcast_object_list",
    needs=("op:broadcast", "dtype:uint8", "dtype:int64"),
)
@world_sizes(1, 2, 3, 5, at_least=1)
@pytest.mark.parametrize("root", ["default", "last"])
def test_every_list_holds_the_objects_of_the_source(ranks: Ranks, root: str) -> None:
    src = None if root == "default" else ranks.world_size - 1
    assert_same_on_all_ranks(ranks.run(broadcast_from, src, False), want=_told_by(src or 0))


@chapter.must(
    "broadcast_object_list/device",
    "With device given, the objects are sent through that device and arrive unchanged.",
    source="torch 2.13 docs, broadcast_object_list",
    needs="op:broadcast",
    rests_on="broadcast_object_list/broadcasts",
)
@world_sizes(2, 3)
def test_objects_travel_by_way_of_a_device(ranks: Ranks) -> None:
    assert_same_on_all_ranks(ranks.run(broadcast_from, 1, True), want=_told_by(1))


def keep_the_own_objects(me: Me) -> tuple[bool, list[Any]]:
    """Whether the list still holds the same objects, by identity; and what it holds."""
    mine = [[me.rank], {"rank": me.rank}, object() if me.rank != 1 else None]
    if me.rank == 0:
        mine[2] = "text"
    told = list(mine)
    dist.broadcast_object_list(told, src=0)
    return all(a is b for a, b in zip(mine, told, strict=True)), told


@chapter.must(
    "broadcast_object_list/source-keeps-its-own",
    "The source's list still holds the same objects that it held before.",
    source=f"{C10D}, broadcast_object_list",
    needs="op:broadcast",
    rests_on="broadcast_object_list/broadcasts",
)
@world_sizes(1, 2, 3)
def test_the_source_keeps_its_very_objects(ranks: Ranks) -> None:
    n = ranks.world_size
    want = [(rank == 0, [[0], {"rank": 0}, "text"]) for rank in range(n)]
    assert_each_rank(ranks.run(keep_the_own_objects), want)


def broadcast_lists_of_differing_lengths(me: Me) -> list[Any]:
    """The source has one object more than the others have room for."""
    told: list[Any] = [me.rank] * (3 if me.rank == 0 else 2)
    dist.broadcast_object_list(told, src=0)
    return told


@chapter.should(
    "broadcast_object_list/lists-of-differing-lengths",
    "If one rank's list is longer than another's, every rank raises, and no process ends.",
    source="torch 2.13 docs, broadcast_object_list: 'each rank must provide lists of equal sizes'",
    needs=("op:broadcast", "feature:mismatch_errors"),
    rests_on="broadcast_object_list/broadcasts",
)
@world_sizes(2, 3)
@deadline(5)
@not_probed()
def test_lists_of_differing_lengths_raise_everywhere(ranks: Ranks) -> None:
    assert_raised(ranks.outcomes(broadcast_lists_of_differing_lengths))


def scatter_from(me: Me, src: int | None, junk_elsewhere: bool) -> list[Any]:
    out: list[Any] = ["before", "kept"]
    objects: list[Any] | None = None
    if me.rank == (src or 0):
        objects = [{"for": rank, "pad": "z" * (700 * rank)} for rank in range(me.world_size)]
    elif junk_elsewhere:
        objects = ["not", "of", "the", "right", "length", me.rank]
    if src is None:
        dist.scatter_object_list(out, objects)
    else:
        dist.scatter_object_list(out, objects, src=src)
    return out


@chapter.must(
    "scatter_object_list/scatters",
    "scatter_object_list puts the source's object for this rank into the first entry of the "
    "output list, and does not change the other entries.",
    source="torch 2.13 docs, scatter_object_list",
    needs=("op:broadcast", "op:scatter", "dtype:uint8", "dtype:int64"),
)
@world_sizes(1, 2, 3, 5, at_least=1)
@pytest.mark.parametrize("root", ["default", "last"])
def test_every_rank_gets_its_own_object(ranks: Ranks, root: str) -> None:
    n = ranks.world_size
    got = ranks.run(scatter_from, None if root == "default" else n - 1, False)
    assert_each_rank(got, [[{"for": r, "pad": "z" * (700 * r)}, "kept"] for r in range(n)])


@chapter.must(
    "scatter_object_list/input-of-others",
    "The input of ranks other than the source is ignored.",
    source="torch 2.13 docs, scatter_object_list: 'Only objects on the src rank will be scattered'",
    needs=("op:broadcast", "op:scatter"),
    rests_on="scatter_object_list/scatters",
)
@world_sizes(2, 3)
def test_the_input_of_other_ranks_is_ignored(ranks: Ranks) -> None:
    n = ranks.world_size
    got = ranks.run(scatter_from, 1, True)
    assert_each_rank(got, [[{"for": r, "pad": "z" * (700 * r)}, "kept"] for r in range(n)])


def change_what_was_received(me: Me) -> list[Any]:
    """What was gathered and scattered, after the receivers have changed what they got."""
    mine = [me.rank, [me.rank]]
    gathered: list[Any] | None = None
    given: list[Any] | None = None
    if me.rank == 0:
        gathered = [None] * me.world_size
        given = [[rank, [rank]] for rank in range(me.world_size)]
    dist.gather_object(mine, gathered)
    share: list[Any] = [None]
    dist.scatter_object_list(share, given)
    for thing in [*(gathered or []), *share]:
        thing[0] = "changed"
        thing[1].append("changed")
    return [mine, given]


@covers("objects/received-are-copies")
@needs("op:gather", "op:scatter", "op:broadcast")
@world_sizes(1, 2, 3)
def test_changing_what_was_received_leaves_what_was_given(ranks: Ranks) -> None:
    each = [[rank, [rank]] for rank in range(ranks.world_size)]
    want = [[own, None if rank else each] for rank, own in enumerate(each)]
    assert_each_rank(ranks.run(change_what_was_received), want)


def scatter_with_wrong_arguments(me: Me) -> None:
    objects = list(range(me.world_size))
    scatter: Callable[..., None] = dist.scatter_object_list
    outputs: list[Any] = [[], (None,), None]
    for output in outputs:
        with pytest.raises(ValueError, match="scatter_object_output_list"):
            scatter(output, objects)
    if me.rank == 0:
        with pytest.raises(ValueError, match="non-None scatter_object_input_list"):
            scatter([None], None, src=0)


@chapter.must(
    "scatter_object_list/arguments",
    "An output that is not a list with at least one entry raises a ValueError, and so does a "
    "source without input.",
    source=f"{C10D}, scatter_object_list",
)
@world_sizes(1, 2)
def test_wrong_lists_are_refused(ranks: Ranks) -> None:
    ranks.run(scatter_with_wrong_arguments)


def use_roots_in_a_subgroup(me: Me, by_group_rank: bool) -> list[Any] | None:
    """In the group of all ranks but 0, with its last member as root."""
    members = list(range(1, me.world_size))
    group = dist.new_group(members)
    if me.rank not in members:
        return None
    root = len(members) - 1 if by_group_rank else members[-1]
    src: dict[str, Any] = {"group_src" if by_group_rank else "src": root, "group": group}
    dst: dict[str, Any] = {"group_dst" if by_group_rank else "dst": root, "group": group}
    told = [f"told by {me.rank}"]
    dist.broadcast_object_list(told, **src)
    share: list[Any] = [None]
    dist.scatter_object_list(share, [f"{me.rank} to {m}" for m in members], **src)
    gathered: list[Any] | None = [None] * len(members) if me.rank == members[-1] else None
    dist.gather_object(f"of {me.rank}", gathered, **dst)
    return [told, share, gathered]


@chapter.must(
    "objects/roots-in-subgroups",
    "In a subgroup, src and dst are global ranks, group_src and group_dst are ranks of the group.",
    source="pytorch#74602, pytorch#149200; torch 2.13 docs, broadcast_object_list",
    rests_on=("broadcast_object_list/broadcasts", "scatter_object_list/scatters"),
)
@world_sizes(2, 3, 4, at_least=2)
@pytest.mark.parametrize("by_group_rank", [False, True], ids=["global rank", "group rank"])
def test_roots_in_a_subgroup_without_rank_0(ranks: Ranks, by_group_rank: bool) -> None:
    n = ranks.world_size
    last = n - 1
    want: list[list[Any] | None] = [None]
    for rank in range(1, n):
        gathered = [f"of {m}" for m in range(1, n)] if rank == last else None
        want.append([[f"told by {last}"], [f"{last} to {rank}"], gathered])
    assert_each_rank(ranks.run(use_roots_in_a_subgroup, by_group_rank), want)


def use_wrong_roots(me: Me) -> None:
    """Rank 0, which is the default root, is not in the group."""
    group = dist.new_group(list(range(1, me.world_size)))
    if me.rank == 0:
        return
    output: list[Any] = [None]
    calls: list[tuple[str, Callable[..., None]]] = [
        ("src", lambda **kw: dist.broadcast_object_list([1], group=group, **kw)),
        ("src", lambda **kw: dist.scatter_object_list(output, [1], group=group, **kw)),
        ("dst", lambda **kw: dist.gather_object(1, None, group=group, **kw)),
    ]
    for name, call in calls:
        with pytest.raises(ValueError, match="not part of group"):
            call()
        with pytest.raises(ValueError, match="not part of group"):
            call(**{name: 0})
        with pytest.raises(ValueError, match="Can't specify both"):
            call(**{name: 1, f"group_{name}": 0})


@chapter.must(
    "objects/root-arguments",
    "A ValueError is raised for a root that is given both ways, for a root outside the group, "
    "and for the default root, global rank 0, in a group without it.",
    source=f"{C10D}, _canonicalize_group_rank",
)
@world_sizes(2, 3)
def test_wrong_roots_are_refused(ranks: Ranks) -> None:
    ranks.run(use_wrong_roots)

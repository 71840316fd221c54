"""new_group: members, errors, backends, use_local_synchronization, names and counts."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from conformance import (
    Chapter,
    Me,
    Ranks,
    assert_each_rank,
    assert_same_on_all_ranks,
    assert_that,
    covers,
    deadline,
    needs,
    world_sizes,
)
from conformance.spec.groups.membership_sums import mark, sum_marks, sum_of_marks
from conformance.spec.torch_versions import needs_argument

C10D = "torch/distributed/distributed_c10d.py of torch 2.13"

chapter = Chapter("groups")


_keeps_order = needs_argument(dist.new_group, "sort_ranks")

_MEMBERS: dict[str, Callable[[int], list[int]]] = {
    "all but the first": lambda n: list(range(1, n)),
    "all but the last": lambda n: list(range(n - 1)),
    "every second": lambda n: list(range(0, n, 2)),
}


def sum_in_new_group(me: Me, members: list[int] | None) -> Tensor:
    return sum_marks(me, dist.new_group(members))


@chapter.must(
    "new_group/members",
    "A collective in a new group takes the contributions of its members only.",
    source="torch 2.13 docs, new_group",
    rests_on="all_reduce/sum",
)
@world_sizes(2, 3, 4, at_least=2)
@pytest.mark.parametrize("which", _MEMBERS)
def test_only_members_contribute(ranks: Ranks, which: str) -> None:
    n = ranks.world_size
    members = _MEMBERS[which](n)
    want = [sum_of_marks(members if rank in members else [rank]) for rank in range(n)]
    assert_each_rank(ranks.run(sum_in_new_group, members), want)


def compare_with_the_default_group(me: Me) -> tuple[Tensor, bool, int]:
    """A message in the new group must not be taken for one of the default group."""
    group = dist.new_group()
    first, second = mark(me), mark(me) * 100
    works = [
        dist.all_reduce(first, group=group, async_op=True),
        dist.all_reduce(second, async_op=True),
    ]
    for work in works:
        work.wait()
    return first, group is dist.group.WORLD, dist.get_rank(group)


@chapter.must(
    "new_group/all-ranks",
    "new_group without ranks makes a group of all ranks, separate from the default group.",
    source="torch 2.13 docs, new_group: 'If None, will be set to all ranks'",
    rests_on="new_group/members",
)
@world_sizes(1, 2, 3)
def test_a_group_of_all_ranks(ranks: Ranks) -> None:
    n = ranks.world_size
    want = [(sum_of_marks(range(n)), False, rank) for rank in range(n)]
    assert_each_rank(ranks.run(compare_with_the_default_group), want)


def everything_alone(me: Me) -> list[Tensor]:
    """Each rank in a group of its own."""
    group = [dist.new_group([rank]) for rank in range(me.world_size)][me.rank]
    reduced, told, own = mark(me), mark(me), mark(me)
    gathered = [torch.zeros(3, device=me.device)]
    dist.all_reduce(reduced, group=group)
    dist.broadcast(told, me.rank, group=group)
    dist.all_gather(gathered, own, group=group)
    dist.barrier(group=group)
    return [reduced, told, *gathered]


@chapter.must(
    "new_group/of-one",
    "In a group of one rank, every collective completes at once with the rank's own contribution.",
    source="gloo#154 and gloo#209",
    rests_on="new_group/members",
)
@world_sizes(1, 2, 3)
@needs("op:broadcast", "op:all_gather", "op:barrier")
def test_a_group_of_one_rank(ranks: Ranks) -> None:
    want = [[sum_of_marks([rank])] * 3 for rank in range(ranks.world_size)]
    assert_each_rank(ranks.run(everything_alone), want)


def make_bad_groups(me: Me) -> tuple[Tensor, int]:
    """All bad lists are refused; then a good one works. Returns its sum and the count."""
    n = me.world_size
    before = dist.get_pg_count()
    bad = [[0, 0], [0, n], [-1], list(range(n + 1))]
    for members in bad:
        with pytest.raises(ValueError, match=r"duplicate|out of range|world size|invalid"):
            dist.new_group(members)
    return sum_marks(me, dist.new_group()), dist.get_pg_count() - before


@chapter.must(
    "new_group/bad-ranks",
    "A list of ranks with duplicates, with a rank that does not exist, or with more ranks than "
    "the world has, raises a ValueError on every rank, and groups made afterwards work.",
    source=f"{C10D}, _new_group_with_tag",
    rests_on="new_group/members",
)
@world_sizes(1, 2, 3)
def test_bad_ranks_are_refused(ranks: Ranks) -> None:
    got = ranks.run(make_bad_groups)
    assert_same_on_all_ranks(got, want=(sum_of_marks(range(ranks.world_size)), 1))


def pass_bad_arguments(me: Me) -> None:
    new_group: Callable[..., object] = dist.new_group
    with pytest.raises(TypeError, match="timedelta"):
        new_group(timeout=3)
    with pytest.raises((AssertionError, ValueError, RuntimeError), match=r"(?i)no_such_backend"):
        new_group(backend="no_such_backend")


@chapter.must(
    "new_group/bad-arguments",
    "A timeout that is not a timedelta raises a TypeError; an unknown backend raises an error "
    "that names it.",
    source=f"{C10D}, _new_group_with_tag and _new_process_group_helper",
)
@world_sizes(1, 2)
def test_bad_arguments_are_refused(ranks: Ranks) -> None:
    ranks.run(pass_bad_arguments)


def use_two_backends(me: Me, default: str, other: str) -> list[Tensor]:
    """The sums of the default group and of another one, of these backends."""
    options = {me.target.backend: me.options}
    dist.init_process_group(
        default,
        store=dist.PrefixStore("here", me.store),
        rank=me.rank,
        world_size=me.world_size,
        pg_options=options.get(default),
    )
    groups = {default: None, other: dist.new_group(backend=other, pg_options=options.get(other))}
    sums = []
    for backend, group in groups.items():
        x = mark(me) if backend == me.target.backend else mark(me).cpu()
        dist.all_reduce(x, group=group)
        sums.append(x)
    return sums


@chapter.must(
    "new_group/another-backend",
    "The default group and another group may have different backends, the target's and gloo, "
    "whichever of the two is the default group's.",
    source="torch 2.13 docs, new_group, backend",
    rests_on="new_group/members",
)
@world_sizes(2)
@pytest.mark.parametrize("is_default", [False, True], ids=["in a world of gloo", "beside gloo"])
def test_groups_may_be_of_two_backends(bare_ranks: Ranks, is_default: bool) -> None:
    default, other = "gloo", bare_ranks.target.backend
    if is_default:
        default, other = other, default
    got = bare_ranks.run(use_two_backends, default, other)
    assert_each_rank(got, [[sum_of_marks([0, 1])] * len({default, other})] * 2)


def use_before_others_have_come(me: Me) -> tuple[Tensor, Tensor]:
    """Rank 0 is first at the new group, and each rank uses it in the next line."""
    if me.rank == 0:
        me.store.set("rank 0 is on its way", "1")
    else:
        me.store.wait(["rank 0 is on its way"])
    group = dist.new_group()
    x, y = mark(me), mark(me)
    work = dist.all_reduce(x, group=group, async_op=True)
    dist.broadcast(y, 0, group=group)
    work.wait()
    return x, y


@chapter.must(
    "new_group/used-at-once",
    "A member may use a new group at once, even if other members make it only later.",
    source="torchft#83",
    rests_on="new_group/members",
)
@world_sizes(2, 3, 4, at_least=2)
@needs("op:broadcast")
def test_a_new_group_may_be_used_at_once(ranks: Ranks) -> None:
    got = ranks.run(use_before_others_have_come)
    assert_same_on_all_ranks(got, want=(sum_of_marks(range(ranks.world_size)), sum_of_marks([0])))


def make_local_groups(me: Me, count: int) -> tuple[list[Tensor], int]:
    """Pairs of neighbours, and a last rank alone. Returns sums, and how many names."""
    first = me.rank // 2 * 2
    members = [rank for rank in (first, first + 1) if rank < me.world_size]
    groups = [dist.new_group(members, use_local_synchronization=True) for _ in range(count)]
    tensors = [mark(me) * 10**i for i in range(count)]
    # In the opposite order, so that groups which are one and the same would be noticed.
    indices = range(count) if me.rank == first else reversed(range(count))
    works = [dist.all_reduce(tensors[i], group=groups[i], async_op=True) for i in indices]
    for work in works:
        work.wait()
    return tensors, len({group.group_name for group in groups})


@chapter.must(
    "new_group/local-synchronization",
    "With use_local_synchronization, only the members make a group; any other rank that takes "
    "part gets none: GroupMember.NON_GROUP_MEMBER, or None.",
    source="torch 2.13 docs, new_group; observed, None before torch 2.14",
    rests_on="new_group/members",
)
@world_sizes(2, 3, 4, at_least=2)
def test_members_alone_make_a_group(ranks: Ranks) -> None:
    n = ranks.world_size
    got = ranks.run(make_local_groups, 1)
    pairs = [[r for r in (rank // 2 * 2, rank // 2 * 2 + 1) if r < n] for rank in range(n)]
    assert_each_rank(got, [([sum_of_marks(pair)], 1) for pair in pairs])


def join_without_being_a_member(me: Me) -> bool:
    group = dist.new_group([(me.rank + 1) % me.world_size], use_local_synchronization=True)
    return group is None or group == dist.GroupMember.NON_GROUP_MEMBER


@covers("new_group/local-synchronization")
@world_sizes(2, 3, 4, at_least=2)
def test_a_stranger_gets_no_group(ranks: Ranks) -> None:
    assert_same_on_all_ranks(ranks.run(join_without_being_a_member), want=True)


@chapter.must(
    "new_group/local-synchronization-twice",
    "Several groups of the same members may be made with use_local_synchronization; they are "
    "separate from each other.",
    source="test_c10d_common.py, groups of the same members",
    needs="feature:nonblocking",
    rests_on="new_group/local-synchronization",
)
@world_sizes(2, 4)
def test_the_same_members_make_several_groups(ranks: Ranks) -> None:
    n = ranks.world_size
    got = ranks.run(make_local_groups, 3)
    pairs = [[rank // 2 * 2, rank // 2 * 2 + 1] for rank in range(n)]
    want = [([sum_of_marks(pair) * 10**i for i in range(3)], 3) for pair in pairs]
    assert_each_rank(got, want)


def make_destroy_and_make_again(me: Me) -> list[Tensor]:
    """The sums in a group of this rank alone that is made three times."""
    sums = []
    for _ in range(3):
        group = dist.new_group([me.rank], use_local_synchronization=True)
        sums.append(sum_marks(me, group))
        dist.destroy_process_group(group)
    return sums


@chapter.must(
    "new_group/local-synchronization-again",
    "A group of one rank that was made with use_local_synchronization and destroyed can be made "
    "again.",
    source="torch 2.13 docs, new_group and destroy_process_group",
    rests_on="new_group/local-synchronization",
)
@world_sizes(2)
def test_a_destroyed_group_is_made_again(ranks: Ranks) -> None:
    want = [[sum_of_marks([rank])] * 3 for rank in range(ranks.world_size)]
    assert_each_rank(ranks.run(make_destroy_and_make_again), want)


def names_of_groups(me: Me, memberships: list[list[int]]) -> list[str | None]:
    """The name of the default group, and of each new one that this rank is in."""
    groups = [dist.new_group(members) for members in memberships]
    names = [
        group.group_name if me.rank in members else None
        for group, members in zip(groups, memberships, strict=True)
    ]
    assert dist.group.WORLD is not None
    return [dist.group.WORLD.group_name, *names]


@chapter.must(
    "new_group/names",
    "Groups that live at the same time have different names, and a group's name is the same on "
    "all of its members.",
    source=f"{C10D}, _process_group_name",
    rests_on="all_gather_object/gathers",
)
@world_sizes(2, 3, 4, at_least=2)
def test_names_are_shared_by_members_and_by_nobody_else(ranks: Ranks) -> None:
    n = ranks.world_size
    memberships = [list(range(n)), list(range(n)), [0], [n - 1], list(range(1, n))]
    by_rank = ranks.run(names_of_groups, memberships)
    for rank, names in enumerate(by_rank):
        own = [name for name in names if name is not None]
        assert_that(len(set(own)) == len(own), f"two groups are called alike: {own}", rank)
    for names_of_one in zip(*by_rank, strict=True):
        known = {name for name in names_of_one if name is not None}
        assert_that(len(known) == 1, f"one group has the names {sorted(known)}")


def climb_a_staircase(me: Me) -> list[Tensor]:
    """Rank r is left out of the first r groups; in the end a group of all, and one of two."""
    n = me.world_size
    for last in range(n - 1):
        dist.new_group(list(range(last + 1)))
    everybody = dist.new_group()
    ends = dist.new_group([0, n - 1])
    return [sum_marks(me, everybody), sum_marks(me, ends)]


@chapter.must(
    "new_group/different-memberships",
    "Groups work even if their members belong to different numbers of groups made before.",
    source="pytorch#189073 and pytorch#190431",
    rests_on="new_group/members",
)
@world_sizes(2, 3, 4, 5)
def test_ranks_with_different_memberships_meet_again(ranks: Ranks) -> None:
    n = ranks.world_size
    everybody, ends = sum_of_marks(range(n)), sum_of_marks([0, n - 1])
    want = [[everybody, ends if rank in (0, n - 1) else sum_of_marks([rank])] for rank in range(n)]
    assert_each_rank(ranks.run(climb_a_staircase), want)


def meet_by_a_hashed_name(me: Me) -> tuple[str, Tensor]:
    """The same staircase; then all make a group whose name each of them works out by itself."""
    for last in range(me.world_size - 1):
        dist.new_group(list(range(last + 1)))
    group = dist.new_group(use_local_synchronization=True, timeout=timedelta(seconds=4))
    return group.group_name, sum_marks(me, group)


@chapter.should(
    "new_group/different-memberships-synchronized-locally",
    "With use_local_synchronization too, a group can be made of ranks that belong to different "
    "numbers of groups made before.",
    source="pytorch#189073 and pytorch#190431",
    rests_on=("new_group/different-memberships", "new_group/local-synchronization"),
)
@world_sizes(2, 3)
@deadline(20)
def test_ranks_with_different_memberships_agree_on_a_hashed_name(ranks: Ranks) -> None:
    got = ranks.run(meet_by_a_hashed_name)
    want = sum_of_marks(range(ranks.world_size))
    assert_same_on_all_ranks(got, (got[0][0], want), what="name and sum")


def make_many_groups(me: Me, count: int) -> list[Tensor]:
    """Group i leaves out rank i modulo the world size."""
    groups = [
        dist.new_group([rank for rank in range(me.world_size) if rank != i % me.world_size])
        for i in range(count)
    ]
    return [sum_marks(me, group) for group in groups]


@chapter.must(
    "new_group/many",
    "Dozens of groups can live at the same time.",
    source="torch 2.13 docs, new_group",
    rests_on="new_group/members",
)
@world_sizes(3)
def test_many_groups_live_at_once(ranks: Ranks) -> None:
    count, n = 24, ranks.world_size
    want = [
        [
            sum_of_marks([rank] if rank == i % n else [r for r in range(n) if r != i % n])
            for i in range(count)
        ]
        for rank in range(n)
    ]
    assert_each_rank(ranks.run(make_many_groups, count), want)


def describe_groups(me: Me) -> list[str]:
    assert dist.group.WORLD is not None
    group = dist.new_group(group_desc="the one for tests")
    return [dist.group.WORLD.group_desc, group.group_desc]


@chapter.must(
    "new_group/description",
    "group_desc of new_group is the description of the group; the default group's is 'default_pg'.",
    source="torch 2.13 docs, new_group, group_desc",
)
@world_sizes(1, 2)
def test_groups_have_descriptions(ranks: Ranks) -> None:
    got = ranks.run(describe_groups)
    assert_same_on_all_ranks(got, want=["default_pg", "the one for tests"])


def count_groups(me: Me) -> list[int]:
    counts = [dist.get_pg_count()]
    for members in ([0], None, [me.world_size - 1]):
        dist.new_group(members)
        counts.append(dist.get_pg_count())
    return counts


@chapter.must(
    "new_group/count",
    "get_pg_count counts the groups that were made, on members and others alike.",
    source=f"{C10D}, get_pg_count",
)
@world_sizes(1, 2, 3)
def test_groups_are_counted(ranks: Ranks) -> None:
    assert_same_on_all_ranks(ranks.run(count_groups), want=[1, 2, 3, 4])

"""reconfigure: a group gets other members, by handles that the user brings to them."""

from __future__ import annotations

import os
import signal
from collections.abc import Collection, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from conformance import (
    Chapter,
    Me,
    Ranks,
    assert_each_rank,
    assert_that,
    deadline,
    world_sizes,
)
from conformance.spec.facts import refusal
from conformance.spec.groups.membership_sums import mark, sum_marks, sum_of_marks
from conformance.spec.groups.starting import start
from conformance.spec.raising import returned
from conformance.spec.torch_versions import needs_method
from conformance.torch_private import reconfigure, reconfigure_handle

chapter = Chapter(
    "groups",
    source="torch 2.15 docs, _reconfigure; c10d/Types.hpp, ReconfigureOptions",
    needs=("feature:reconfigure", "op:all_reduce", "reduce_op:sum"),
)
pytestmark = needs_method(dist.ProcessGroup, "reconfigure")

Place = tuple[int, int, Tensor]
_BRIEF = timedelta(seconds=1)


def begin(me: Me) -> Any:
    """The default group, which has no ranks yet."""
    start(me, "reconfigured", enable_reconfigure=True)
    return dist.group.WORLD


def handles_of(me: Me, number: int, members: Sequence[int]) -> list[str]:
    """Those of the members, in their order; each of them calls it."""
    me.store.set(f"{number}, {me.rank}", reconfigure_handle())
    return [me.store.get(f"{number}, {rank}").decode() for rank in members]


def enter(number: int, handles: Collection[str], **how: Any) -> None:
    reconfigure(number, handles, **how).wait()


def place(me: Me) -> Place:
    """This process' rank, the number of ranks, and what a sum comes to."""
    return dist.get_rank(), dist.get_world_size(), sum_marks(me)


def expected(members: Sequence[int], rank: int) -> Place | None:
    if rank not in members:
        return None
    return members.index(rank), len(members), sum_of_marks(members)


def in_turn(me: Me, memberships: Sequence[Sequence[int]]) -> list[Place | None]:
    """What this process is in one membership after the other."""
    begin(me)
    found: list[Place | None] = []
    for number, members in enumerate(memberships, start=1):
        if me.rank in members:
            enter(number, handles_of(me, number, members))
        found.append(place(me) if me.rank in members else None)
        for rank in members:  # what one has left, another may still be in
            me.store.set(f"{number}, {me.rank} is through", "")
            me.store.wait([f"{number}, {rank} is through"])
    return found


def check(ranks: Ranks, *memberships: Sequence[int]) -> None:
    want = [[expected(members, r) for members in memberships] for r in range(ranks.world_size)]
    assert_each_rank(ranks.run(in_turn, memberships), want)


@chapter.must(
    "reconfigure/first",
    "The first reconfigure of a group that was made with enable_reconfigure connects its members: "
    "the place of a handle in the list is the rank of its process.",
    rests_on="all_reduce/sum",
)
@world_sizes(2, 3)
def test_the_first_members_have_the_ranks_of_the_list(bare_ranks: Ranks) -> None:
    check(bare_ranks, [*reversed(range(bare_ranks.world_size))])


@chapter.must(
    "reconfigure/other-ranks",
    "A group that is reconfigured with the handles in another order has the same members with "
    "other ranks.",
    rests_on="reconfigure/first",
)
@world_sizes(3)
def test_members_change_their_ranks(bare_ranks: Ranks) -> None:
    check(bare_ranks, [0, 1, 2], [2, 0, 1], [1, 2, 0])


@chapter.must(
    "reconfigure/fewer-and-more",
    "A group can be reconfigured with fewer members and, later, with those that were left out.",
    rests_on="reconfigure/first",
)
@world_sizes(3)
def test_members_leave_and_come_back(bare_ranks: Ranks) -> None:
    check(bare_ranks, [0, 1, 2], [2, 0], [0, 1, 2], [1], [1, 0])


def rank_in_a_set(me: Me) -> Place:
    begin(me)
    enter(1, set(handles_of(me, 1, range(me.world_size))))
    return place(me)


@chapter.must(
    "reconfigure/set",
    "With a set of handles the group chooses the ranks: each member has one of its own, from 0 on.",
    rests_on="reconfigure/first",
)
@world_sizes(2, 3)
def test_a_set_leaves_the_ranks_to_the_group(bare_ranks: Ranks) -> None:
    n = bare_ranks.world_size
    got = bare_ranks.run(rank_in_a_set)
    ranks_seen = sorted(rank for rank, _, _ in got)
    assert_that(ranks_seen == [*range(n)], f"the members have the ranks {ranks_seen}")
    assert_each_rank([found[1:] for found in got], [(n, sum_of_marks(range(n)))] * n)


def before_the_first(me: Me) -> tuple[str, Place]:
    begin(me)
    words = refusal(lambda: sum_marks(me), RuntimeError)
    enter(1, handles_of(me, 1, range(me.world_size)))
    return words, place(me)


@chapter.must(
    "reconfigure/not-before",
    "Before its first reconfigure such a group has no members: a collective raises RuntimeError "
    "'has not been initialized', and the group can be reconfigured then.",
    rests_on="reconfigure/first",
)
@world_sizes(2)
def test_nothing_is_reduced_before_there_are_members(bare_ranks: Ranks) -> None:
    for rank, (words, found) in enumerate(bare_ranks.run(before_the_first)):
        assert_that("has not been initialized" in words, f"a collective ended with {words!r}", rank)
        assert_each_rank([found], [expected(range(2), rank)], ranks=[rank])


def with_a_pending_call(me: Me) -> tuple[str, Place]:
    """Rank 0 has issued a reduction in which no other rank takes part."""
    begin(me)
    everyone = range(me.world_size)
    enter(1, handles_of(me, 1, everyone))
    sum_marks(me)
    work: Any = dist.all_reduce(mark(me), async_op=True) if me.rank == 0 else None
    enter(2, handles_of(me, 2, everyone))
    return refusal(work.wait, RuntimeError) if work else "", place(me)


@chapter.must(
    "reconfigure/pending",
    "What is pending when a group is reconfigured raises RuntimeError when it is waited for.",
    needs="feature:nonblocking",
    source="observed, torch 2.15.0 gloo",
    rests_on="reconfigure/first",
)
@world_sizes(2)
def test_what_is_pending_raises(bare_ranks: Ranks) -> None:
    got = bare_ranks.run(with_a_pending_call)
    words = got[0][0]
    is_raised = words and not words.startswith("(")
    assert_that(bool(is_raised), f"the wait for the pending reduction ended with {words!r}", 0)
    assert_each_rank([found for _, found in got], [expected(range(2), r) for r in range(2)])


def without_the_dead(me: Me) -> Place:
    """Rank 1 of three dies; the others go on, with the last one first."""
    begin(me)
    enter(1, handles_of(me, 1, range(3)))
    sum_marks(me)
    if me.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    enter(2, handles_of(me, 2, [2, 0]))
    return place(me)


@chapter.must(
    "reconfigure/without-the-dead",
    "When a member has died, the others can go on as a group without it.",
    rests_on="reconfigure/fewer-and-more",
)
@world_sizes(3)
def test_the_others_go_on(bare_ranks: Ranks) -> None:
    outcomes = bare_ranks.outcomes(without_the_dead)
    got = returned(outcomes, "going on without rank 1", but={1})
    assert_each_rank(got, [expected([2, 0], rank) for rank in (0, 2)], ranks=[0, 2])


def refused(me: Me, kind: str) -> tuple[str, Place]:
    """What is said of such handles, and whether the group is as it was."""
    begin(me)
    handles = handles_of(me, 1, range(me.world_size))
    enter(1, handles)
    wrong = {"none": [], "text": [reconfigure_handle(), "text"]}.get(
        kind, [handle for rank, handle in enumerate(handles) if rank != me.rank]
    )
    words = refusal(lambda: enter(2, wrong, timeout=_BRIEF), RuntimeError)
    return words, place(me)


@chapter.should(
    "reconfigure/wrong-handles",
    "Without a handle, with text that is none, and without the caller's own, reconfigure raises "
    "RuntimeError, and the group stays as it was.",
    source="observed, torch 2.15.0 gloo",
    rests_on="reconfigure/first",
)
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("none", "requires at least one handle"),
        ("text", "reconfigure handle: text"),
        ("others", "is not part of the new communicator"),
    ],
)
@deadline(20)
@world_sizes(2)
def test_wrong_handles_are_refused(bare_ranks: Ranks, kind: str, words: str) -> None:
    for rank, (said, found) in enumerate(bare_ranks.run(refused, kind)):
        assert_that(words in said, f"reconfigure ended with {said!r}", rank)
        assert_each_rank([found], [expected(range(2), rank)], ranks=[rank])


def number_used_again(me: Me) -> tuple[str, Place]:
    begin(me)
    for number in (1, 2):
        enter(number, handles_of(me, number, range(me.world_size)))
    words = refusal(lambda: enter(2, handles_of(me, 3, range(me.world_size))), RuntimeError)
    return words, place(me)


@chapter.must(
    "reconfigure/number-used-again",
    "A number that the group was reconfigured with last raises RuntimeError 'was already used' on "
    "every member, and the group stays as it was.",
    rests_on="reconfigure/first",
)
@deadline(20)
@world_sizes(2, 3)
def test_a_number_is_used_once(bare_ranks: Ranks) -> None:
    n = bare_ranks.world_size
    for rank, (said, found) in enumerate(bare_ranks.run(number_used_again)):
        assert_that("was already used" in said, f"reconfigure ended with {said!r}", rank)
        assert_each_rank([found], [expected(range(n), rank)], ranks=[rank])


def whether_supported(me: Me) -> bool:
    group: Any = dist.group.WORLD
    supports: bool = group.supports_reconfigure
    return supports


@chapter.should(
    "reconfigure/is-said",
    "A group that can be reconfigured says so by supports_reconfigure.",
    rests_on="reconfigure/first",
)
@world_sizes(1)
def test_a_group_says_that_it_can_be_reconfigured(ranks: Ranks) -> None:
    assert_each_rank(ranks.run(whether_supported), [True])

"""Abort hooks of a group: whether there are any, and when they are called."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from conformance import (
    Chapter,
    Me,
    Ranks,
    assert_each_rank,
    assert_same_on_all_ranks,
    covers,
    deadline,
    not_probed,
    world_sizes,
)
from conformance.spec.faults.giving_up import GROUP_TIMEOUT_S
from conformance.spec.torch_versions import needs_method

chapter = Chapter(
    "groups",
    source="torch 2.15, c10d/Backend.hpp, Abort Hook API",
    needs=("feature:abort_hooks", "feature:timeouts", "op:all_reduce", "reduce_op:sum"),
)
pytestmark = [needs_method(dist.ProcessGroup, "supports_abort_hooks"), not_probed()]


def answer_about_hooks(me: Me) -> list[str]:
    """What a group says of abort hooks that does not fit together."""
    group: Any = dist.group.WORLD
    supports = False
    with suppress(RuntimeError):  # a group in Python that says nothing of them
        supports = group.supports_abort_hooks
    wrong = []
    for name, arguments in (("register_abort_hook", [7, list]), ("unregister_abort_hook", [7])):
        is_taken = True
        try:
            getattr(group, name)(*arguments)
        except RuntimeError:
            is_taken = False
        if is_taken is not supports:
            wrong.append(f"supported: {supports}; {name}: {'no ' * is_taken}error")
    return wrong


@chapter.must(
    "abort_hooks/said",
    "A group says whether it supports abort hooks; one that does takes them and lets them be taken "
    "away, and one that does not raises a RuntimeError for both.",
    needs=(),
)
@world_sizes(1, 2)
def test_a_group_says_whether_it_has_hooks(ranks: Ranks) -> None:
    assert_same_on_all_ranks(ranks.run(answer_about_hooks), want=[])


def run_with_hooks(me: Me, fails: bool, asynchronous: bool, register: str) -> list[str]:
    """What hooks had said when the caller knew how a call had ended, in which rank 0 is alone if it
    fails.

    register: numbers of hooks in the order in which they are registered; "-" before one takes it
        away again.
    """
    group: Any = dist.new_group(timeout=timedelta(seconds=GROUP_TIMEOUT_S) if fails else None)
    said: list[str] = []

    def says(word: str) -> Callable[[], None]:
        return lambda: said.append(word)

    for number in register.split():
        if number.startswith("-"):
            group.unregister_abort_hook(int(number[1:]))
        else:
            group.register_abort_hook(int(number), says(number))
    if fails and me.rank > 0:
        return []
    try:
        work = dist.all_reduce(torch.ones(3, device=me.device), group=group, async_op=asynchronous)
        if asynchronous:
            assert work is not None
            work.wait()
    except RuntimeError:
        return ["an error", *dict.fromkeys(said)]
    dist.destroy_process_group(group)
    return ["no error", *said]


@chapter.must(
    "abort_hooks/when-a-call-fails",
    "When a collective runs out of time, the group's abort hooks have been called once its caller "
    "gets the error.",
    rests_on=("abort_hooks/said", "timeouts/of-the-group"),
)
@world_sizes(2)
@deadline(20)
def test_hooks_are_called_when_a_call_fails(ranks: Ranks) -> None:
    assert_each_rank(ranks.run(run_with_hooks, True, False, "7"), [["an error", "7"], []])


@covers("abort_hooks/when-a-call-fails")
@world_sizes(3)
@deadline(20)
def test_hooks_are_called_when_an_asynchronous_call_fails(ranks: Ranks) -> None:
    assert_each_rank(ranks.run(run_with_hooks, True, True, "7"), [["an error", "7"], [], []])


@chapter.must(
    "abort_hooks/by-number",
    "Each abort hook has a number: several are all called, and one that was unregistered by its "
    "number is not.",
    rests_on="abort_hooks/when-a-call-fails",
)
@world_sizes(2)
@deadline(20)
def test_hooks_go_by_their_numbers(ranks: Ranks) -> None:
    got = ranks.run(run_with_hooks, True, False, "3 7 5 -7")
    assert_each_rank([sorted(said) for said in got], [["3", "5", "an error"], []])


@chapter.must(
    "abort_hooks/without-a-failure",
    "Where no call fails, no abort hook is called, nor when the group is destroyed.",
    rests_on="abort_hooks/said",
)
@world_sizes(2)
def test_hooks_are_not_called_without_a_failure(ranks: Ranks) -> None:
    got = ranks.run(run_with_hooks, False, False, "7")
    assert_same_on_all_ranks(got, want=["no error"])

"""Rank translation, get_backend, group.WORLD, and the error for mixed dtypes in a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from conformance import (
    Chapter,
    Me,
    Ranks,
    assert_each_rank,
    assert_same_on_all_ranks,
    assert_that,
    not_probed,
    world_sizes,
)

chapter = Chapter("groups")


def translate(me: Me, members: list[int]) -> list[Any]:
    """Global to group ranks, back again, and the list of them; on members only."""
    group = dist.new_group(members)
    if me.rank not in members:
        return [dist.get_rank(group), dist.get_world_size(group)]
    to_group = [dist.get_group_rank(group, rank) for rank in members]
    back = [dist.get_global_rank(group, rank) for rank in to_group]
    return [to_group, back, dist.get_process_group_ranks(group), dist.get_rank(group)]


@chapter.must(
    "ranks/translation",
    "get_group_rank and get_global_rank are inverse to each other on the members, and "
    "get_process_group_ranks lists the global ranks in the order of the group.",
    source="torch 2.13 docs, get_group_rank, get_global_rank, get_process_group_ranks",
)
@chapter.must(
    "ranks/non-member",
    "For a rank that is not a member, get_rank and get_world_size of the group are -1.",
    source="torch 2.13 docs, get_rank: '-1, if not part of the group'",
)
@world_sizes(2, 3, 4, at_least=2)
def test_ranks_are_translated_there_and_back(ranks: Ranks) -> None:
    n = ranks.world_size
    members = list(range(1, n))
    order = list(range(n - 1))
    want: list[list[Any]] = [[order, members, members, rank - 1] for rank in members]
    assert_each_rank(ranks.run(translate, members), [[-1, -1], *want])


def translate_in_the_default_group(me: Me) -> list[Any]:
    world = dist.group.WORLD
    assert world is not None
    everybody = range(me.world_size)
    return [
        [dist.get_group_rank(world, rank) for rank in everybody],
        [dist.get_global_rank(world, rank) for rank in everybody],
        dist.get_process_group_ranks(None),
        dist.get_process_group_ranks(world),
        dist.get_rank(),
        dist.get_rank(world),
        dist.get_world_size(world),
    ]


@chapter.must(
    "ranks/default-group",
    "In the default group, however it is passed, global ranks are group ranks.",
    source="torch 2.13 docs, get_group_rank: 'calling this function on the default process group "
    "returns identity'",
)
@world_sizes(1, 2, 3)
def test_in_the_default_group_all_ranks_are_themselves(ranks: Ranks) -> None:
    n = ranks.world_size
    order = list(range(n))
    want = [[order, order, order, order, rank, rank, n] for rank in order]
    assert_each_rank(ranks.run(translate_in_the_default_group), want)


def translate_wrongly(me: Me) -> None:
    """The group is of the last rank alone."""
    last = me.world_size - 1
    group = dist.new_group([last])
    if me.rank == last:
        with pytest.raises(ValueError, match="not part of group"):
            dist.get_group_rank(group, 0)
        with pytest.raises(ValueError, match="not part of group"):
            dist.get_global_rank(group, 1)
    stranger = dist.ProcessGroup(me.rank, me.world_size)  # type: ignore[call-arg]  # torch's stub lacks this form
    with pytest.raises(ValueError, match="not registered"):
        dist.get_group_rank(stranger, 0)
    with pytest.raises(ValueError, match="not registered"):
        dist.get_global_rank(stranger, 0)


@chapter.must(
    "ranks/translation-errors",
    "A rank that is not in the group raises a ValueError that says 'not part of group', and a "
    "group that torch does not know one that says 'not registered'.",
    source="test_c10d_common.py, rank membership",
)
@world_sizes(2, 3)
def test_ranks_outside_are_refused(ranks: Ranks) -> None:
    ranks.run(translate_wrongly)


def ask_for_backends(me: Me) -> list[str]:
    """Of the default group, and of one made from it without rank 0."""
    group = dist.new_group(list(range(1, me.world_size)))
    names = [dist.get_backend(), dist.get_backend_config()]
    if me.rank == 0:
        for ask in (dist.get_backend, dist.get_backend_config):
            with pytest.raises(ValueError, match="Invalid process group"):
                ask(group)
        return names
    return [*names, dist.get_backend(group), dist.get_backend_config(group)]


@chapter.must(
    "groups/backend-name",
    "get_backend of the default group and of a group made from it is the target's backend; "
    "get_backend_config names it for the target's device; both refuse a rank that is not a "
    "member.",
    source="torch 2.13 docs, get_backend and get_backend_config",
)
@world_sizes(2, 3)
def test_groups_know_their_backend(ranks: Ranks) -> None:
    backend = ranks.target.backend.lower()
    on_device = backend if ":" in backend else f"{ranks.device}:{backend}"
    for rank, names in enumerate(ranks.run(ask_for_backends)):
        for name, config in zip(names[::2], names[1::2], strict=True):
            assert_that(name == backend, f"get_backend is {name!r}, want {backend!r}", rank)
            known = set(on_device.split(",")) <= set(config.split(","))
            assert_that(known, f"get_backend_config {config!r} lacks {on_device!r}", rank)


def mix_dtypes(me: Me) -> None:
    """Every call is refused before anything is sent."""
    n = me.world_size
    single = torch.zeros(2, device=me.device)
    half, flat = single.half(), torch.zeros(n, device=me.device)
    singles = [torch.zeros(2, device=me.device) for _ in range(n)]
    mixed = [*singles[:-1], half]
    refused: dict[str, Callable[[], object]] = {
        "all_gather, input": lambda: dist.all_gather(singles, half),
        "all_gather, outputs": lambda: dist.all_gather([*singles, half], single),
        "reduce_scatter, output": lambda: dist.reduce_scatter(half, singles),
        "reduce_scatter, inputs": lambda: dist.reduce_scatter(single, [*singles, half]),
        "all_to_all, inputs": lambda: dist.all_to_all(singles, [*singles, half]),
        "all_to_all, both": lambda: dist.all_to_all(mixed, [*singles, single]),
        "all_to_all_single": lambda: dist.all_to_all_single(flat.half(), flat),
        "gather, input": lambda: dist.gather(half, singles if me.rank == 0 else None),
        "scatter, output": lambda: dist.scatter(half, singles if me.rank == 0 else None),
    }
    rooted_at_0 = {"gather, input", "scatter, output"}
    for name, call in refused.items():
        if name in rooted_at_0 and me.rank != 0:
            continue
        try:
            call()
        except ValueError as error:
            if "tensors with different dtypes" in str(error):
                continue
            pytest.fail(f"{name}: the error does not say why: {error}")
        pytest.fail(f"{name} was accepted")


@not_probed()
@chapter.must(
    "groups/mixed-dtypes-refused",
    "Tensors of different dtypes in one call raise a ValueError that says 'tensors with "
    "different dtypes', before anything is sent.",
    source="test_c10d_common.py, dtype mismatch",
    needs=(
        "op:all_gather",
        "op:reduce_scatter",
        "op:all_to_all",
        "op:all_to_all_single",
        "op:gather",
        "op:scatter",
    ),
)
@world_sizes(1, 2, 3)
def test_mixed_dtypes_are_refused(ranks: Ranks) -> None:
    ranks.run(mix_dtypes)


def world_by_name(me: Me) -> list[bool]:
    x = torch.ones(1, device=me.device)
    dist.all_reduce(x, group=dist.group.WORLD)
    dist.all_reduce(x, group=None)
    dist.all_reduce(x)
    return [
        float(x) == float(me.world_size**3),
        dist.get_backend(dist.group.WORLD) == dist.get_backend(),
    ]


@chapter.must(
    "init/world",
    "dist.group.WORLD is the default group, and passing it is the same as passing no group.",
    source="torch/distributed/distributed_c10d.py of torch 2.13, group.WORLD",
    rests_on="all_reduce/sum",
)
@world_sizes(1, 2, 3)
def test_world_is_the_default_group(ranks: Ranks) -> None:
    assert_same_on_all_ranks(ranks.run(world_by_name), want=[True, True])

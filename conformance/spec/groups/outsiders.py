"""Calls from ranks outside the group, roots outside it, and roots as global or group ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from conformance import Chapter, Me, Ranks, assert_each_rank, deadline, needs, world_sizes
from conformance.spec.groups.membership_sums import mark, sum_of_marks

chapter = Chapter("groups")


# The calls of a rank that is not in the group: group, a tensor, n like it, 3 * n elements.
_Call = Callable[[Any, Tensor, list[Tensor], Tensor], object]
_OPERATIONS: dict[str, _Call] = {
    "all_reduce": lambda g, x, xs, flat: dist.all_reduce(x, group=g),
    "broadcast": lambda g, x, xs, flat: dist.broadcast(x, 1, group=g),
    "reduce": lambda g, x, xs, flat: dist.reduce(x, 1, group=g),
    "all_gather": lambda g, x, xs, flat: dist.all_gather(xs, x, group=g),
    "all_gather_into_tensor": lambda g, x, xs, flat: dist.all_gather_into_tensor(flat, x, group=g),
    "reduce_scatter": lambda g, x, xs, flat: dist.reduce_scatter(x, xs, group=g),
    "reduce_scatter_tensor": lambda g, x, xs, flat: dist.reduce_scatter_tensor(x, flat, group=g),
    "all_to_all": lambda g, x, xs, flat: dist.all_to_all(xs, xs, group=g),
    "all_to_all_single": lambda g, x, xs, flat: dist.all_to_all_single(flat, flat, group=g),
    "gather": lambda g, x, xs, flat: dist.gather(x, None, dst=1, group=g),
    "scatter": lambda g, x, xs, flat: dist.scatter(x, None, src=1, group=g),
    "barrier": lambda g, x, xs, flat: dist.barrier(group=g),
    "monitored_barrier": lambda g, x, xs, flat: dist.monitored_barrier(group=g),
    "isend": lambda g, x, xs, flat: dist.isend(x, 1, group=g),
    "irecv": lambda g, x, xs, flat: dist.irecv(x, 1, group=g),
    "send": lambda g, x, xs, flat: dist.send(x, 1, group=g),
    "recv": lambda g, x, xs, flat: dist.recv(x, 1, group=g),
    "recv from anybody": lambda g, x, xs, flat: dist.recv(x, group=g),
    "batch_isend_irecv": lambda g, x, xs, flat: dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, x, 1, g)]
    ),
    "all_gather_object": lambda g, x, xs, flat: dist.all_gather_object(xs, 1, group=g),
    "gather_object": lambda g, x, xs, flat: dist.gather_object(1, None, dst=1, group=g),
    "broadcast_object_list": lambda g, x, xs, flat: dist.broadcast_object_list(xs, 1, group=g),
    "scatter_object_list": lambda g, x, xs, flat: dist.scatter_object_list(xs, None, 1, group=g),
    "send_object_list": lambda g, x, xs, flat: dist.send_object_list(xs, 1, group=g),
    "recv_object_list": lambda g, x, xs, flat: dist.recv_object_list(xs, 1, group=g),
}


def call_from_outside(me: Me, name: str) -> tuple[str, list[Tensor]] | None:
    """Rank 0 calls; the members do nothing. Returns whether it was told, and the tensors."""
    n = me.world_size
    group = dist.new_group(list(range(1, n)))
    if me.rank:
        return None
    x, flat = mark(me), torch.ones(3 * n, device=me.device)
    xs = [torch.full((3,), float(i), device=me.device) for i in range(n)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            returned = _OPERATIONS[name](group, x, xs, flat)
        except (ValueError, RuntimeError, AttributeError) as error:
            return "told" if "group" in str(error) else f"raised {error!r}", [x, *xs, flat]
    told = any("does not belong" in str(warning.message) for warning in caught)
    if not told:
        return f"silently returned {returned!r}", [x, *xs, flat]
    if returned not in (None, -1, []):
        return f"returned {returned!r}", [x, *xs, flat]
    return "told", [x, *xs, flat]


@chapter.must(
    "groups/outsiders-are-told",
    "An operation of a rank that is not in the group warns that it 'does not belong' or raises, "
    "returns at once and does not change its tensors.",
    source="pytorch#67600; torch 2.13, _warn_not_in_group",
    rests_on="new_group/members",
)
@world_sizes(3)
@deadline(10)
@pytest.mark.parametrize("name", _OPERATIONS)
def test_a_rank_outside_the_group_is_told(ranks: Ranks, name: str) -> None:
    n = ranks.world_size
    tensors = [
        sum_of_marks([0]),
        *(torch.full((3,), float(i)) for i in range(n)),
        torch.ones(3 * n),
    ]
    assert_each_rank(ranks.run(call_from_outside, name)[:1], [("told", tensors)])


def name_a_root_outside(me: Me) -> None:
    """Rank 0 is the root, and not in the group."""
    group = dist.new_group(list(range(1, me.world_size)))
    if me.rank == 0:
        return
    x = mark(me)
    calls: dict[str, Callable[[], object]] = {
        "broadcast": lambda: dist.broadcast(x, 0, group=group),
        "reduce": lambda: dist.reduce(x, 0, group=group),
        "gather": lambda: dist.gather(x, None, 0, group=group),
        "scatter": lambda: dist.scatter(x, None, 0, group=group),
    }
    for name, call in calls.items():
        try:
            call()
        except ValueError as error:
            if "not part of group" in str(error):
                continue
            pytest.fail(f"{name}: the error does not say why: {error}")
        pytest.fail(f"{name} was accepted")


@chapter.must(
    "groups/root-outside",
    "A root that is not in the group raises a ValueError on the members.",
    source="torch/distributed/distributed_c10d.py of torch 2.13, _canonicalize_group_rank",
)
@world_sizes(2, 3)
def test_a_root_outside_the_group_is_refused(ranks: Ranks) -> None:
    ranks.run(name_a_root_outside)


def use_roots(me: Me, by_group_rank: bool) -> list[Any] | None:
    """In the group of all ranks but 0, everything goes from or to its last member."""
    members = list(range(1, me.world_size))
    group = dist.new_group(members)
    if me.rank not in members:
        return None
    root = len(members) - 1 if by_group_rank else members[-1]
    src: dict[str, Any] = {"group_src" if by_group_rank else "src": root}
    dst: dict[str, Any] = {"group_dst" if by_group_rank else "dst": root}
    is_root = me.rank == members[-1]
    told, total, share = mark(me), mark(me), torch.zeros(3, device=me.device)
    dist.broadcast(told, group=group, **src)
    dist.reduce(total, group=group, **dst)
    gathered = [torch.zeros(3, device=me.device) for _ in members] if is_root else None
    dist.gather(mark(me), gathered, group=group, **dst)
    parts = [mark(me) * (place + 1) for place in range(len(members))] if is_root else None
    dist.scatter(share, parts, group=group, **src)
    return [told, total if is_root else None, gathered, share]


@chapter.must(
    "groups/roots-are-global",
    "In a group without rank 0, src and dst of collectives are global ranks, group_src and "
    "group_dst are ranks of the group.",
    source="torchrec#4601; torch 2.13 docs, broadcast",
    rests_on="new_group/members",
)
@world_sizes(2, 3, 4, at_least=2)
@needs("op:broadcast", "op:reduce", "op:gather", "op:scatter")
@pytest.mark.parametrize("by_group_rank", [False, True], ids=["global rank", "group rank"])
def test_roots_in_a_group_without_rank_0(ranks: Ranks, by_group_rank: bool) -> None:
    members = range(1, ranks.world_size)
    last = members[-1]
    of_root = sum_of_marks([last])
    want: list[list[Any] | None] = [None]
    for place, rank in enumerate(members):
        is_root = rank == last
        total = sum_of_marks(members) if is_root else None
        gathered = [sum_of_marks([r]) for r in members] if is_root else None
        want.append([of_root, total, gathered, of_root * (place + 1)])
    assert_each_rank(ranks.run(use_roots, by_group_rank), want)

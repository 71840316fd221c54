"""Backends: register_backend, backend strings, creator arguments, process groups in Python."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

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
    world_sizes,
)
from conformance.spec.groups.python_group import CREATED, NAME, NotingGroup, register

chapter = Chapter("groups", source="test_c10d_common.py, Python process groups")


def ask_for_backends(me: Me) -> list[Any]:
    before = dist.is_backend_available("a_backend_that_nobody_has")
    register()
    backend = dist.Backend
    return [
        before,
        dist.is_backend_available(NAME),
        dist.is_backend_available(NAME.upper()),
        getattr(backend, NAME.upper()),
        backend(NAME.upper()),
        str(dist.BackendConfig(backend(NAME))),
        dist.is_backend_available(f"cpu:{NAME}"),
    ]


@chapter.must(
    "backends/registered",
    "A registered backend is an attribute of Backend, is available, and can be named in upper or "
    "lower case.",
)
@world_sizes(1)
def test_a_registered_backend_is_known(bare_ranks: Ranks) -> None:
    [got] = bare_ranks.run(ask_for_backends)
    assert_each_rank([got], [[False, True, True, NAME, NAME, f"cpu:{NAME}", True]])


def ask_for_the_target(me: Me) -> bool:
    return dist.is_backend_available(me.target.backend)


@chapter.must(
    "backends/target-is-available",
    "is_backend_available is true for the target's backend, once its modules are imported.",
    source="torch 2.13 docs, is_backend_available",
)
@world_sizes(1)
def test_the_backend_of_the_target_is_available(bare_ranks: Ranks) -> None:
    [available] = bare_ranks.run(ask_for_the_target)
    assert_that(available, f"{bare_ranks.target.backend!r} is not available")


def read_config_strings(me: Me) -> dict[str, str]:
    register()
    good = {
        "gloo": "cpu:gloo,cuda:gloo",
        "GLOO": "cpu:gloo,cuda:gloo",
        NAME: f"cpu:{NAME}",
        f"cpu:{NAME},cuda:nccl": f"cpu:{NAME},cuda:nccl",
        f"cpu:gloo,cuda:{NAME.upper()}": f"cpu:gloo,cuda:{NAME}",
    }
    for text in ("cpu:gloo,cuda:nccl,", f"cpu:gloo,cuda:nccl,cpu:{NAME}", "cpu:gloo:nccl"):
        with pytest.raises(ValueError, match=r"Invalid device:backend|Duplicate device"):
            dist.BackendConfig(dist.Backend(text))
    read = {text: str(dist.BackendConfig(dist.Backend(text))) for text in good}
    return {text: f"{got}, want {good[text]}" for text, got in read.items() if got != good[text]}


@chapter.must(
    "backends/config-strings",
    "A backend string names one backend, or one for each device; malformed strings raise a "
    "ValueError.",
    source="test_c10d_common.py, backend config",
)
@world_sizes(1)
def test_backend_strings_name_devices(bare_ranks: Ranks) -> None:
    assert_each_rank(bare_ranks.run(read_config_strings), [{}])


def _start(me: Me, backend: str = NAME, **kwargs: Any) -> None:
    register()
    dist.init_process_group(
        backend, store=me.store, rank=me.rank, world_size=me.world_size, **kwargs
    )


def look_at_the_creator(me: Me) -> list[Any]:
    """What the creator was called with, for the default group and for a subgroup without rank 0."""
    _start(me, timeout=timedelta(seconds=77))
    if me.world_size > 1:
        dist.new_group(list(range(1, me.world_size)), timeout=timedelta(seconds=5))
    seen: list[Any] = []
    stores = []
    for store, rank, size, timeout in CREATED:
        stores.append(store)
        seen.append((rank, size, timeout.total_seconds()))
    for number, store in enumerate(stores):
        store.set("the same key", f"rank {me.rank}, group {number}")
    read = [store.get("the same key").decode() for store in stores]
    apart = all(text.endswith(f"group {number}") for number, text in enumerate(read))
    return [*seen, apart]


@chapter.must(
    "backends/creator-arguments",
    "The creator of a backend is called with the group's own store, the group rank, the group "
    "size and the timeout.",
    source="torch 2.13 docs, Backend.register_backend",
)
@world_sizes(1, 2, 3)
def test_what_a_creator_is_called_with(bare_ranks: Ranks) -> None:
    n = bare_ranks.world_size
    want: list[list[Any]] = [[(0, n, 77.0), True]]
    want += [[(rank, n, 77.0), (rank - 1, n - 1, 5.0), True] for rank in range(1, n)]
    assert_each_rank(bare_ranks.run(look_at_the_creator), want)


def look_at_the_default_timeout(me: Me) -> list[float]:
    _start(me)
    dist.new_group()
    return [timeout.total_seconds() for _, _, _, timeout in CREATED]


@chapter.must(
    "backends/default-timeout",
    "Groups made without a timeout have one of 30 minutes.",
    source="torch 2.13 docs, init_process_group",
    rests_on="backends/creator-arguments",
)
@world_sizes(1)
def test_the_default_timeout_is_half_an_hour(bare_ranks: Ranks) -> None:
    assert_each_rank(bare_ranks.run(look_at_the_default_timeout), [[1800.0, 1800.0]])


def look_at_the_extended_creator(me: Me) -> list[Any]:
    _start(me, f"{NAME}_extended", timeout=timedelta(seconds=77), pg_options="of the default group")
    members = list(range(1, me.world_size))
    dist.new_group(members, pg_options={"of": "the subgroup"})
    return [
        (
            created.group_rank,
            created.group_size,
            created.timeout.total_seconds(),
            created.group_id,
            list(created.global_ranks_in_group),
            options,
        )
        for created, options in CREATED
    ]


@chapter.must(
    "backends/extended-creator-arguments",
    "A creator registered with extended_api gets the group's store, rank, size, timeout, name "
    "and global ranks, and the options that were passed.",
    source="torch 2.13 docs, Backend.register_backend, extended_api",
)
@world_sizes(2, 3)
def test_what_an_extended_creator_is_called_with(bare_ranks: Ranks) -> None:
    n = bare_ranks.world_size
    members = list(range(1, n))
    for rank, seen in enumerate(bare_ranks.run(look_at_the_extended_creator)):
        of_default: Any = (rank, n, 77.0, seen[0][3], [], "of the default group")
        want: list[Any] = [of_default]
        if rank:
            options = {"of": "the subgroup"}
            want.append((rank - 1, n - 1, 1800.0, seen[1][3], members, options))
            assert_that(seen[0][3] != seen[1][3], "two groups have one name", rank)
        assert_each_rank([seen], [want], what=f"rank {rank}")


def work_in_a_python_group(me: Me) -> tuple[list[Tensor], list[str], str]:
    """One of each operation. Returns tensors, the noted calls, and the group's name."""
    _start(me)
    group = dist.group.WORLD
    assert isinstance(group, NotingGroup)
    n = me.world_size
    reduced, told, share = torch.zeros(2), torch.zeros(2), torch.zeros(2)
    gathered = [torch.zeros(2) for _ in range(n)]
    sent, received = torch.zeros(2), torch.zeros(2)
    dist.all_reduce(reduced)
    work = dist.broadcast(told, 0, async_op=True)
    assert work is not None
    work.wait()
    dist.all_gather(gathered, torch.full((2,), 1.0))
    dist.reduce_scatter(share, [torch.full((2,), 10.0 * place) for place in range(n)])
    dist.barrier()
    peer = (me.rank + 1) % n
    dist.send(sent, peer, tag=4)
    dist.recv(received, peer)
    return [reduced, told, *gathered, share, sent, received], group.calls, group.name()


@covers("backends/dispatch", "backends/name")
@world_sizes(2, 3)
def test_operations_call_the_methods_of_a_python_group(bare_ranks: Ranks) -> None:
    n = bare_ranks.world_size
    want = []
    for rank in range(n):
        peer = (rank + 1) % n
        gathered = [float(1 + place) for place in range(n)]
        values = [2.0, 3.0, *gathered, 10.0 * rank, 5.0, 7.0]
        calls = ["allreduce", "broadcast", "allgather", "reduce_scatter", "barrier"]
        calls += [f"send to {peer}, tag 4", f"recv from {peer}, tag 0"]
        want.append(([torch.full((2,), value) for value in values], calls, "Notes"))
    assert_each_rank(bare_ranks.run(work_in_a_python_group), want)


def dispatch_in_a_subgroup(me: Me) -> tuple[list[str], bool]:
    """A subgroup of a Python group is made by the same creator, and is called with group ranks."""
    _start(me)
    members = list(range(1, me.world_size))
    group: Any = dist.new_group(members)
    if me.rank == 0:
        return [], True
    dist.all_reduce(torch.zeros(1), group=group)
    if me.rank == 1 and len(members) > 1:
        dist.send(torch.zeros(1), 2, group=group)
    return group.calls, isinstance(group, NotingGroup)


@chapter.must(
    "backends/dispatch",
    "Operations on a group that is a Python subclass of ProcessGroup call its methods.",
)
@world_sizes(2, 3)
def test_subgroups_of_a_python_group(bare_ranks: Ranks) -> None:
    n = bare_ranks.world_size
    first = ["allreduce", *(["send to 1, tag 0"] if n > 2 else [])]
    want = [([], True), (first, True), *[(["allreduce"], True)] * (n - 2)]
    assert_each_rank(bare_ranks.run(dispatch_in_a_subgroup), want)


def name_python_groups(me: Me) -> list[str]:
    _start(me)
    return [NotingGroup(0, 1).name(), dist.get_backend(), dist.get_backend_config()]


@chapter.must("backends/name", "The name of a Python group is what its getBackendName returns.")
@world_sizes(1)
def test_a_python_group_has_the_name_it_says(bare_ranks: Ranks) -> None:
    got = bare_ranks.run(name_python_groups)
    assert_same_on_all_ranks(got, want=["Notes", NAME, f"cpu:{NAME}"])

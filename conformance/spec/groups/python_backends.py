"""Backends in Python, which torch 2.14 has: what they are called with, and what becomes of it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from conformance import Chapter, Me, Ranks, assert_each_rank, assert_same_on_all_ranks, world_sizes
from conformance.oracle.collectives import COLLECTIVES, Call, before
from conformance.spec.collectives.perform import issue
from conformance.spec.groups.python_backend import (
    METHODS,
    NAME,
    PROPERTIES,
    CoalescingBackend,
    FullBackend,
    RecordingBackend,
    start,
)
from conformance.torch_private import takes_python_backends

chapter = Chapter("groups", source="torch 2.14, c10d/py/PyBackend.hpp and Backend.register_backend")
pytestmark = pytest.mark.skipif(
    not takes_python_backends, reason="this torch's Backend cannot be subclassed in Python"
)

IN_PLACE = ("all_reduce", "reduce", "broadcast")
REDUCTIONS = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor")
ROOTED = ("reduce", "broadcast", "gather", "scatter")


def splits_of(op: str, size: int) -> tuple[tuple[int, ...], ...]:
    """For all_to_all_single, from and to each rank another number of rows."""
    if op != "all_to_all_single":
        return ()
    return tuple(tuple(1 + source + 2 * to for to in range(size)) for source in range(size))


def compare_a_call(
    me: Me, op: str, asynchronous: bool, members: Iterable[int]
) -> tuple[list[Any], list[Any], bool] | None:
    """What a call should be recorded as, what it was, and whether the caller sees what was done."""
    group, backend = start(me, members=members)
    if group is None:
        return None
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    call = Call(op, root=size - 1, reduce_op="max", splits=splits_of(op, size))
    buffers = before(call, rank, size)
    given, taken = ([x.clone() for x in xs] for xs in (buffers.given, buffers.taken))
    work = issue(call, given, taken, group, async_op=asynchronous)
    if asynchronous:
        work.wait()
    splits = call.splits
    want = (
        METHODS[op],
        [x.data_ptr() for x in (taken if op in IN_PLACE else [*taken, *given])],
        [[row[rank] for row in splits], list(splits[rank])] if splits else [],
        size - 1 if op in ROOTED else None,
        "RedOpType.MAX" if op in REDUCTIONS else None,
        asynchronous,
    )
    all_of_them = zip((*buffers.given, *buffers.taken), (*given, *taken), strict=True)
    is_seen = all(torch.equal(old + 1, new) for old, new in all_of_them)
    return [want, ("wait", 0.0)], backend.calls, is_seen


def assert_calls_are(got: list[Any]) -> None:
    got = [x for x in got if x is not None]
    assert_each_rank([calls for _, calls, _ in got], [want for want, _, _ in got], what="calls")
    assert_same_on_all_ranks([seen for _, _, seen in got], want=True, what="tensors")


@chapter.must(
    "python_backends/each-collective",
    "A collective calls the method of its backend in Python once, with the caller's own tensors, "
    "root, reduction and rows, and whether it is asynchronous.",
)
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("op", COLLECTIVES)
@world_sizes(1, 3)
def test_collectives_call_methods(bare_ranks: Ranks, op: str, asynchronous: bool) -> None:
    assert_calls_are(bare_ranks.run(compare_a_call, op, asynchronous, ()))


@chapter.must(
    "python_backends/subgroup",
    "A subgroup has a backend in Python of its own, which is called with ranks of the subgroup.",
    rests_on="python_backends/each-collective",
)
@pytest.mark.parametrize("op", ROOTED)
@world_sizes(3)
def test_methods_get_ranks_of_the_group(bare_ranks: Ranks, op: str) -> None:
    assert_calls_are(bare_ranks.run(compare_a_call, op, False, (1, 2)))


def compare_messages(me: Me, members: Iterable[int]) -> tuple[list[Any], list[Any]] | None:
    group, backend = start(me, members=members)
    if group is None:
        return None
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    peer = (rank + 1) % size
    x, y, z = (torch.zeros(2) for _ in range(3))
    dist.send(x, group=group, group_dst=peer, tag=4)
    work = dist.irecv(y, group=group, group_src=peer, tag=5)
    assert work is not None
    work.wait()
    group.recv_anysource([z], 6).wait()
    want = [("send", x.data_ptr(), peer, 4), ("wait", 0.0), ("recv", y.data_ptr(), peer, 5)]
    want += [("wait", 0.0), ("recv_anysource", z.data_ptr(), 6), ("wait", 0.0)]
    return want, backend.calls


@chapter.must(
    "python_backends/messages",
    "send, recv and a receive from any rank call the methods of a backend in Python with the "
    "caller's tensor, the peer's rank in the group and the tag.",
)
@pytest.mark.parametrize("members", [(), (1, 2)], ids=["everyone", "subgroup"])
@world_sizes(3)
def test_messages_call_methods(bare_ranks: Ranks, members: tuple[int, ...]) -> None:
    got = [x for x in bare_ranks.run(compare_messages, members) if x is not None]
    assert_each_rank([calls for _, calls in got], [want for want, _ in got])


def calls_of_waits(me: Me) -> list[Any]:
    _, backend = start(me)
    x = torch.zeros(2)
    dist.all_reduce(x)
    dist.barrier()
    work = dist.all_reduce(x, async_op=True)
    assert work is not None
    said: list[Any] = [[name for name, *_ in backend.calls]]
    backend.calls.clear()
    work.wait()
    work.wait(timedelta(seconds=3))
    return [*said, backend.calls]


@chapter.must(
    "python_backends/handles",
    "A synchronous call waits for the handle that its method in Python returned; a wait for an "
    "asynchronous one is a wait for that handle, with the caller's timeout.",
    rests_on="python_backends/each-collective",
)
@world_sizes(2)
def test_handles_are_those_of_methods(bare_ranks: Ranks) -> None:
    names = ["allreduce", "wait", "barrier", "wait", "allreduce"]
    want = [names, [("wait", 0.0), ("wait", 3.0)]]
    assert_same_on_all_ranks(bare_ranks.run(calls_of_waits), want=want)


class OfABackend(Exception):
    """What a backend in Python raises."""


def errors_of_calls(me: Me, asynchronous: bool) -> list[str]:
    _, backend = start(me)
    said = []
    for place in ("fails", "fails_in_wait"):
        setattr(backend, place, OfABackend(f"{place} on rank {me.rank}"))
        try:
            work = dist.all_reduce(torch.zeros(2), async_op=asynchronous)
            if asynchronous:
                assert work is not None
                work.wait()
        except OfABackend as error:
            said.append(str(error))
        setattr(backend, place, None)
    return said


@chapter.must(
    "python_backends/errors",
    "What a method in Python or a wait for its handle raises reaches the caller, as it was raised.",
    rests_on="python_backends/handles",
)
@pytest.mark.parametrize("asynchronous", [False, True])
@world_sizes(2)
def test_errors_reach_the_caller(bare_ranks: Ranks, asynchronous: bool) -> None:
    want = [[f"{place} on rank {r}" for place in ("fails", "fails_in_wait")] for r in range(2)]
    assert_each_rank(bare_ranks.run(errors_of_calls, asynchronous), want)


def errors_of_missing_methods(me: Me) -> dict[str, str]:
    """Of what says too little, what was said."""
    group, _ = start(me, RecordingBackend)
    wrong = {}
    for op in COLLECTIVES:
        call = Call(op)
        buffers = before(call, dist.get_rank(), dist.get_world_size())
        # of the one-tensor forms, messages have the older names, too
        words = METHODS[op].replace("_", "").removesuffix("single")
        try:
            issue(call, [*buffers.given], [*buffers.taken], group)
            wrong[op] = "no error"
        except RuntimeError as error:
            said = str(error)
            if not ("Records" in said and words in said.replace("_", "").lower()):
                wrong[op] = said
    return wrong


@chapter.must(
    "python_backends/missing-operation",
    "A collective that a backend in Python lacks raises a RuntimeError that names the backend and "
    "the operation.",
)
@world_sizes(2)
def test_missing_operations_are_named(bare_ranks: Ranks) -> None:
    assert_same_on_all_ranks(bare_ranks.run(errors_of_missing_methods), want={})


def what_the_group_says(me: Me) -> list[Any]:
    group, backend = start(me)
    held = group._get_backend(torch.device("cpu"))
    return [held is backend, dist.get_backend(), dist.get_backend_config(), held.name()]


@chapter.must(
    "python_backends/of-the-group",
    "The backend of a group is the object in Python that its creator made; the group's backend has "
    "the registered name, and the object the one that it says.",
)
@world_sizes(2)
def test_groups_have_the_object(bare_ranks: Ranks) -> None:
    want = [True, NAME, f"cpu:{NAME}", "Records"]
    assert_same_on_all_ranks(bare_ranks.run(what_the_group_says), want=want)


def life_of_a_backend(me: Me) -> list[Any]:
    group, backend = start(me, members=range(me.world_size))
    calls, seen = backend.calls, weakref.ref(backend)
    del backend
    gc.collect()
    dist.all_reduce(torch.zeros(1), group=group)
    said: list[Any] = [seen() is not None, [name for name, *_ in calls]]
    dist.destroy_process_group(group)
    del group
    gc.collect()
    return [*said, [name for name, *_ in calls[2:]], seen() is None]


@chapter.must(
    "python_backends/lifetime",
    "A backend in Python lives as long as its group, is shut down once when the group is "
    "destroyed, and is freed with it.",
    rests_on="python_backends/each-collective",
)
@world_sizes(2)
def test_backends_live_as_long_as_their_group(bare_ranks: Ranks) -> None:
    want = [True, ["allreduce", "wait"], ["shutdown"], True]
    assert_same_on_all_ranks(bare_ranks.run(life_of_a_backend), want=want)


def calls_of_coalescing(me: Me) -> list[str]:
    _, backend = start(me, CoalescingBackend)
    x, y = torch.zeros(1), torch.zeros(1)
    peer = (me.rank + 1) % me.world_size
    messages = [dist.P2POp(dist.isend, x, peer), dist.P2POp(dist.irecv, y, peer)]
    for work in dist.batch_isend_irecv(messages):
        work.wait()
    return [name for name, *_ in backend.calls]


@chapter.must(
    "python_backends/coalescing",
    "Messages that are sent as a batch are joined by a backend in Python that supports coalescing: "
    "between its start and its end, whose handle is waited for.",
    rests_on="python_backends/messages",
)
@world_sizes(2)
def test_batches_are_joined(bare_ranks: Ranks) -> None:
    want = ["start", "send", "recv", "end", "wait"]
    assert_same_on_all_ranks(bare_ranks.run(calls_of_coalescing), want=want)


def properties_of_a_backend(me: Me) -> list[str]:
    """Those that do not say False."""
    _, backend = start(me, RecordingBackend)
    wrong = []
    for name in PROPERTIES:
        try:
            said = getattr(backend, name)
        except RecursionError as error:
            said = error
        if said is not False:
            wrong.append(f"{name}: {said!r}")
    return wrong


@chapter.must(
    "python_backends/properties",
    "What a backend in Python does not say that it supports, it does not support.",
    source="c10d/Backend.hpp, supportsSplitting and the like",
)
@world_sizes(1)
def test_what_is_not_said_is_not_supported(bare_ranks: Ranks) -> None:
    assert_same_on_all_ranks(bare_ranks.run(properties_of_a_backend), want=[])


class SummingBackend(FullBackend):
    """Of two ranks, as if the other one had twice what this one has."""

    def allreduce(self, tensors: Any, options: Any) -> Any:
        for tensor in tensors:
            tensor.mul_(3)
        return self.record("allreduce", outputs=tensors)

    def broadcast(self, tensors: Any, options: Any) -> Any:
        return self.record("broadcast")

    def allgather(self, outputs: Any, inputs: Any, options: Any) -> Any:
        for row, tensor in zip(outputs, inputs, strict=True):
            for out in row:
                out.copy_(tensor)
        return self.record("allgather")


def gradients_of_ddp(me: Me) -> list[Tensor]:
    start(me, SummingBackend)
    module = torch.nn.Linear(3, 2, bias=False)
    with torch.no_grad():
        module.weight.copy_(torch.arange(6.0).reshape(2, 3))
    model = torch.nn.parallel.DistributedDataParallel(module)
    model(torch.ones(1, 3)).pow(2).sum().backward()
    assert module.weight.grad is not None
    return [module.weight.grad]


@chapter.must(
    "python_backends/ddp",
    "DistributedDataParallel averages gradients over a backend in Python.",
    source="torch 2.15 docs, DistributedDataParallel",
    rests_on="python_backends/each-collective",
)
@world_sizes(2)
def test_ddp_trains_over_a_python_backend(bare_ranks: Ranks) -> None:
    want = [torch.tensor([[9.0] * 3, [36.0] * 3])]
    assert_same_on_all_ranks(bare_ranks.run(gradients_of_ddp), want=want)

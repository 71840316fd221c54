"""Process state and groups: RNG, defaults, grad and inference mode, signals, descriptors, fork."""

from __future__ import annotations

import os
import random
import resource
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from conformance import (
    Chapter,
    Me,
    Ranks,
    adapts,
    assert_each_rank,
    assert_that,
    covers,
    needs,
    world_sizes,
)
from conformance.oracle.collectives import Call, after, before, receives
from conformance.spec.collectives.perform import issue
from conformance.spec.groups.starting import start
from conformance.spec.waiting import rounds_of_messages

chapter = Chapter("collectives")


OPS = ("all_reduce", "broadcast", "all_gather", "reduce", "reduce_scatter_tensor")


def process_state(device: torch.device) -> Mapping[str, Any]:
    """Name -> a value that is equal as long as it has not been changed."""
    state: dict[str, Any] = {
        "torch's random generator": torch.get_rng_state().tolist(),
        "Python's random generator": random.getstate(),
        "NumPy's random generator": repr(np.random.get_state()),
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "default dtype": torch.get_default_dtype(),
        "number of threads": torch.get_num_threads(),
        "working directory": os.getcwd(),
        "environment": dict(os.environ),
        "signal handlers": {s: signal.getsignal(s) for s in signal.valid_signals()},
    }
    if device.type != "cpu":
        module = torch.get_device_module(device)
        state["the device's random generator"] = module.get_rng_state(device).tolist()
        state["current device"] = module.current_device()
    return state


def what_changes(me: Me) -> list[str]:
    """Names of what was another thing at the end, of a default group with some operations."""
    # What torch itself does once in a process is no doing of the group's.
    torch.ones(2, device=me.device, requires_grad=True).sum().backward()
    seen = process_state(me.device)
    start(me, "surroundings")
    for op in OPS:
        if me.target.lacks((f"op:{op}",)):
            continue
        for async_op in (False, True):
            buffers = before(Call(op), me.rank, me.world_size)
            given = [x.to(me.device) for x in buffers.given]
            taken = [x.to(me.device) for x in buffers.taken]
            work = issue(Call(op), given, taken, async_op=async_op)
            if async_op:
                work.wait()
    dist.new_group()
    dist.all_reduce(torch.ones(1, device=me.device))  # no rank leaves while others still connect
    dist.destroy_process_group()
    now = process_state(me.device)
    return [name for name, before_it in seen.items() if now[name] != before_it]


@chapter.must(
    "work/leaves-the-process-alone",
    "A group and its operations change nothing else in the process: neither the state of random "
    "generators, grad mode, default dtype or number of threads, nor the working directory, the "
    "environment or signal handlers.",
    source="derived: runs could not be repeated otherwise",
    rests_on="all_reduce/async",
)
@world_sizes(2)
def test_the_process_is_left_alone(bare_ranks: Ranks) -> None:
    for rank, changed in enumerate(bare_ranks.run(what_changes)):
        assert_that(not changed, f"rank {rank} finds changed: {', '.join(changed)}", rank)


@dataclass(frozen=True, slots=True)
class Planned:
    """A collective of this rank, and its tensors."""

    call: Call
    async_op: bool
    given: list[Tensor]
    taken: list[Tensor]


def planned(me: Me) -> list[Planned]:
    """Of each kind a blocking and an asynchronous one, with fresh tensors."""
    found = []
    for op in OPS:
        if me.target.lacks((f"op:{op}",)):
            continue
        for async_op in (False, True):
            call = Call(op, salt=int(async_op))
            buffers = before(call, me.rank, me.world_size)
            given = [x.to(me.device, copy=True) for x in buffers.given]
            taken = [x.to(me.device, copy=True) for x in buffers.taken]
            found.append(Planned(call, async_op, given, taken))
    return found


def carry_out(plan: Sequence[Planned], group: Any = None) -> None:
    for one in plan:
        work = issue(one.call, one.given, one.taken, group, async_op=one.async_op)
        if one.async_op:
            work.wait()


def assert_right(me: Me, plan: Sequence[Planned]) -> None:
    for one in plan:
        if not receives(one.call, me.rank):
            continue
        right = after(one.call, me.rank, me.world_size).taken
        for got, want in zip(one.taken, right, strict=True):
            same = torch.equal(got.detach().cpu(), want)
            assert_that(same, f"{one.call} left {got} instead of {want}", me.rank)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """While this lasts, torch makes floating-point tensors of another dtype."""
    usual = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(usual)


def used_with_another_default(me: Me, name: str) -> None:
    """The default group and a new one."""
    in_world, in_group = planned(me), planned(me)
    with torch.device("meta") if name == "meta" else default_dtype(getattr(torch, name)):
        carry_out(in_world)
        carry_out(in_group, dist.new_group())
        dist.barrier()
    assert_right(me, in_world)
    assert_right(me, in_group)


@chapter.must(
    "surroundings/defaults",
    "torch's default dtype and default device have no effect on groups and their operations.",
    source="derived: models are made in bfloat16, or on the device 'meta'",
    rests_on="all_reduce/async",
)
@adapts()
@needs("op:barrier")
@world_sizes(2)
@pytest.mark.parametrize("name", ["float64", "bfloat16", "meta"])
def test_other_defaults_make_no_difference(ranks: Ranks, name: str) -> None:
    ranks.run(used_with_another_default, name)


def used_in_inference_mode(me: Me) -> None:
    with torch.inference_mode():
        plan = planned(me)
        carry_out(plan)
    assert_right(me, plan)


def sent_in_inference_mode(me: Me) -> None:
    with torch.inference_mode():
        message = torch.full((3,), float(me.rank), device=me.device)
        if me.rank == 0:
            dist.send(message, 1)
        elif me.rank == 1:
            dist.recv(message, 0)
            assert_that(not message.any().item(), f"rank 0's message is {message}", me.rank)


@chapter.must(
    "surroundings/inference-mode",
    "In inference mode, collectives and point-to-point operations take tensors that were made in "
    "it.",
    source="derived: metrics of an evaluation",
    rests_on="all_reduce/async",
)
@adapts()
@world_sizes(2)
def test_inference_mode(ranks: Ranks) -> None:
    ranks.run(used_in_inference_mode)


@covers("surroundings/inference-mode")
@needs("op:send")
@world_sizes(2)
def test_messages_in_inference_mode(ranks: Ranks) -> None:
    ranks.run(sent_in_inference_mode)


def with_gradients(me: Me) -> list[Planned]:
    """Collectives whose inputs, or else the tensors that they work on, require gradients."""
    plan = planned(me)
    for one in plan:
        for x in one.given or one.taken:
            x.requires_grad_()
    carry_out(plan)
    return plan


def used_with_parameters(me: Me) -> None:
    plan = with_gradients(me)
    assert_right(me, plan)
    for one in plan:
        for x in one.given or one.taken:
            kept = x.is_leaf and x.requires_grad
            assert_that(kept, f"{one.call} left a tensor with {x.grad_fn}", me.rank)
    weight = torch.nn.Parameter(torch.full((3,), float(me.rank), device=me.device))
    if me.rank == 0:
        dist.send(weight, 1)
    elif me.rank == 1:
        dist.recv(weight, 0)
        assert_that(not weight.any().item(), f"rank 0's message is {weight}", me.rank)


@chapter.must(
    "surroundings/parameters",
    "Tensors that require gradients are read, reduced and overwritten like other tensors, and "
    "stay leaves.",
    source="derived: parameters that are broadcast as they are",
    rests_on="all_reduce/async",
)
@adapts()
@needs("op:send")
@world_sizes(2, 3)
def test_tensors_that_require_gradients(ranks: Ranks) -> None:
    ranks.run(used_with_parameters)


def with_history(me: Me) -> list[str]:
    """The collectives that left outputs which require gradients."""
    plan = [one for one in with_gradients(me) if one.given]
    return [str(one.call) for one in plan if any(x.requires_grad for x in one.taken)]


@chapter.should(
    "surroundings/no-history",
    "Outputs do not start to require gradients because the inputs do.",
    source="derived: collectives of torch.distributed cannot be differentiated",
    rests_on="surroundings/parameters",
)
@adapts()
@world_sizes(2)
def test_outputs_have_no_history(ranks: Ranks) -> None:
    for rank, found in enumerate(ranks.run(with_history)):
        assert_that(not found, f"outputs require gradients after {', '.join(found)}", rank)


def interrupted(me: Me) -> tuple[int, list[float]]:
    """Rank 0 has a timer, and waits for the others, who are late: how often the timer was heard,
    and what came out."""
    heard = 0

    def listen(*_: object) -> None:
        nonlocal heard
        heard += 1

    x = torch.ones(3, device=me.device)
    seen = []
    usual = signal.signal(signal.SIGALRM, listen)
    try:
        if me.rank == 0:
            signal.setitimer(signal.ITIMER_REAL, 0.002, 0.002)
        for _ in range(3):
            if me.rank:
                for _ in rounds_of_messages(me, 20):
                    pass
            dist.all_reduce(x)
            work = dist.all_reduce(x, async_op=True)
            work.wait()
            seen.append(float(x[0]))
            if me.rank == me.world_size - 1:
                dist.send(x, 0)
            elif me.rank == 0:
                dist.recv(x, me.world_size - 1)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, usual)
    return heard, seen


@chapter.must(
    "surroundings/signals",
    "A signal that the process handles while an operation waits for other ranks does not end "
    "the operation.",
    source="derived: timers of profilers, warnings of schedulers",
    rests_on="all_reduce/async",
)
@needs("op:send")
@world_sizes(2, 3)
def test_a_timer_ends_nothing(ranks: Ranks) -> None:
    got = ranks.run(interrupted)
    n = float(ranks.world_size)
    assert_each_rank([seen for _, seen in got], [[n**2, n**4, n**6]] * ranks.world_size)
    assert_that(got[0][0] > 0, "the timer was never heard", 0)


@contextmanager
def many_descriptors() -> Iterator[None]:
    """While this lasts, all descriptors below 1024 are in use, if there may be as many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = 2048 if hard == resource.RLIM_INFINITY else min(hard, 2048)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, allowed), hard))
    first = os.open(os.devnull, os.O_RDONLY)
    opened = [first]
    try:
        while opened[-1] < min(1100, allowed - 512):
            opened.append(os.dup(first))
        yield
    finally:
        for descriptor in opened:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def used_beside_many_descriptors(me: Me) -> None:
    plan = planned(me)
    with many_descriptors():
        start(me, "beside many descriptors")
        carry_out(plan)
        dist.destroy_process_group()
    assert_right(me, plan)


@chapter.must(
    "surroundings/many-descriptors",
    "A process that has more than a thousand file descriptors open can create groups and use them.",
    source="derived: select takes descriptors below 1024",
    rests_on="all_reduce/async",
)
@adapts()
@world_sizes(2)
def test_a_group_beside_many_descriptors(bare_ranks: Ranks) -> None:
    bare_ranks.run(used_beside_many_descriptors)


def used_after_a_child(me: Me) -> None:
    group = dist.new_group()
    carry_out(planned(me), group)
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    for where in (None, group):
        plan = planned(me)
        carry_out(plan, where)
        assert_right(me, plan)


@chapter.must(
    "surroundings/forked-children",
    "When a process that was forked from a rank ends, the rank's groups keep working.",
    source="derived: the workers of a data loader",
    rests_on="all_reduce/async",
)
@adapts()
@world_sizes(2)
def test_a_child_does_no_harm(ranks: Ranks) -> None:
    ranks.run(used_after_a_child)

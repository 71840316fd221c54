"""Random programs of collectives, over several groups and partly asynchronous."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from conformance import Chapter, Me, Ranks, adapts, assert_each_rank, needs, world_sizes
from conformance.oracle.programs import (
    BETWEEN,
    IN_PLACE,
    NUMEL,
    REDUCING,
    REGISTERS,
    Program,
    Step,
    initial,
    run_alone,
)
from conformance.spec.collectives.perform import (
    REDUCE_OPS,
    all_gather_into_tensor,
    reduce_scatter_tensor,
)
from conformance.spec.waiting import all_are_here
from conformance.target import Target

chapter = Chapter("collectives", source="derived")


def run_program(me: Me, program: Program) -> list[Tensor]:
    """This rank's part of the program; its registers at the end."""
    groups = [None, *(dist.new_group(list(members)) for members in program.groups[1:])]
    registers = [x.to(me.device) for x in initial(me.rank)]
    pending: list[tuple[Any, set[int]]] = []
    for step in program.steps:
        if me.rank not in program.groups[step.group]:
            continue
        touched = {step.source, step.target}
        busy = [entry for entry in pending if entry[1] & touched]
        for work, _ in reversed(busy):
            work.wait()
        pending = [entry for entry in pending if entry not in busy]
        work = carry_out(step, registers, groups[step.group])
        if step.deferred:
            pending.append((work, touched))
    for work, _ in reversed(pending):
        work.wait()
    number = me.store.add(f"programs of rank {me.rank}", 1)
    all_are_here(me, f"the groups of program {number}")
    for group in groups[1:]:
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)
    return registers


def carry_out(step: Step, registers: list[Tensor], group: Any) -> Any:
    """Issue one step; returns its Work if it is deferred."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    part = NUMEL // size
    root = step.root % size
    global_root = dist.get_process_group_ranks(group)[root]
    source, target = registers[step.source], registers[step.target]
    op = REDUCE_OPS[step.reduce_op]
    how: dict[str, Any] = {"group": group, "async_op": step.deferred}
    match step.op:
        case "barrier":
            return dist.barrier(**how)
        case "all_reduce":
            return dist.all_reduce(target, op, **how)
        case "broadcast":
            return dist.broadcast(target, global_root, **how)
        case "reduce":
            # What reduce leaves elsewhere has a requirement of its own.
            return dist.reduce(target if rank == root else target.clone(), global_root, op, **how)
        case "all_gather":
            return dist.all_gather(list(target.split(part)), source[:part], **how)
        case "all_gather_into_tensor":
            return all_gather_into_tensor(target, source[:part], **how)
        case "gather":
            outputs = list(target.split(part)) if rank == root else None
            return dist.gather(source[:part], outputs, global_root, **how)
        case "scatter":
            inputs = list(source.split(part)) if rank == root else None
            return dist.scatter(target[:part], inputs, global_root, **how)
        case "reduce_scatter":
            return dist.reduce_scatter(target[:part], list(source.split(part)), op, **how)
        case "reduce_scatter_tensor":
            return reduce_scatter_tensor(target[:part], source, op, **how)
        case "all_to_all":
            return dist.all_to_all(list(target.split(part)), list(source.split(part)), **how)
    assert step.op == "all_to_all_single", step.op
    received, sent = step.received(rank, size), step.sent(rank, size)
    return dist.all_to_all_single(target, source, received, sent, **how)


@st.composite
def programs(draw: st.DrawFn, target: Target, world_size: int) -> Program:
    """Programs of the operations that the target claims."""
    world = tuple(range(world_size))
    members = st.lists(st.sampled_from(world), min_size=1, unique=True).map(sorted).map(tuple)
    groups = (world, *draw(st.lists(members, max_size=2)))
    steps = draw(st.lists(steps_in(groups, target), min_size=1, max_size=12))
    return Program(groups, tuple(steps))


@st.composite
def steps_in(draw: st.DrawFn, groups: tuple[tuple[int, ...], ...], target: Target) -> Step:
    claimed = target.capabilities.ops
    ops = [op for op in (*IN_PLACE, *BETWEEN, "barrier") if op in claimed]
    op = draw(st.sampled_from(ops or ["all_reduce"]))
    group = draw(st.integers(0, len(groups) - 1))
    size = len(groups[group])
    source = draw(st.integers(0, REGISTERS - 1))
    others = [i for i in range(REGISTERS) if i != source]
    reduce_ops = sorted(target.capabilities.reduce_ops & {"sum", "product", "min", "max", "bxor"})
    return Step(
        op,
        group,
        source,
        draw(st.sampled_from(others)) if op in BETWEEN else source,
        draw(st.sampled_from(reduce_ops or ["sum"])) if op in REDUCING else "sum",
        draw(st.integers(0, size - 1)),
        draw(compositions(size)) if op == "all_to_all_single" else (),
        draw(st.booleans()),
    )


def compositions(size: int) -> st.SearchStrategy[tuple[int, ...]]:
    """Ways to write NUMEL as a sum of so many numbers, some of them 0."""
    cuts = st.lists(st.integers(0, NUMEL), min_size=size - 1, max_size=size - 1).map(sorted)
    return cuts.map(lambda c: tuple(b - a for a, b in zip([0, *c], [*c, NUMEL], strict=True)))


@chapter.must(
    "order/programs",
    "Any program of collectives over several groups, including asynchronous ones, leaves the "
    "same values on every rank as the same program computed in one process.",
    rests_on=(
        "order/groups-are-apart",
        "all_to_all_single/uneven",
        "all_gather_into_tensor/concatenated",
        "broadcast/values",
        "gather/values",
        "reduce/sum",
        "reduce_scatter_tensor/concatenated",
        "scatter/values",
    ),
)
@adapts()
@needs("op:all_reduce", "reduce_op:sum", "dtype:int64")
@world_sizes(2, 3, 4)
@given(data=st.data())
@settings(max_examples=25)
def test_a_program_does_what_it_does_alone(ranks: Ranks, data: st.DataObject) -> None:
    program = data.draw(programs(ranks.target, ranks.world_size), label="program")
    assert_each_rank(ranks.run(run_program, program), run_alone(program))

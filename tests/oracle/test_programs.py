"""Programs run in one process: single steps by hand, and laws that whole programs obey."""

from __future__ import annotations

import torch

from conformance.oracle.programs import NUMEL, REGISTERS, Program, Step, initial, run_alone

WORLD = (0, 1, 2)


def run(*steps: Step, groups: tuple[tuple[int, ...], ...] = (WORLD,)) -> list[list[torch.Tensor]]:
    return run_alone(Program(groups, steps))


def test_an_empty_program_and_a_barrier_change_nothing() -> None:
    state = run(Step("barrier"))
    for rank in WORLD:
        assert all(torch.equal(a, b) for a, b in zip(state[rank], initial(rank), strict=True))


def test_all_reduce_adds_one_register_and_no_other() -> None:
    state = run(Step("all_reduce", source=1, target=1))
    want = initial(0)[1] + initial(1)[1] + initial(2)[1]
    for rank in WORLD:
        assert torch.equal(state[rank][1], want)
        assert torch.equal(state[rank][0], initial(rank)[0])


def test_a_group_leaves_the_others_alone() -> None:
    state = run(Step("broadcast", group=1, root=1), groups=(WORLD, (0, 2)))
    assert torch.equal(state[0][0], initial(2)[0])
    assert torch.equal(state[1][0], initial(1)[0])


def test_a_root_is_taken_modulo_the_size_of_the_group() -> None:
    state = run(Step("broadcast", root=5))
    assert torch.equal(state[0][0], initial(2)[0])


def test_reduce_changes_the_root_alone() -> None:
    state = run(Step("reduce", reduce_op="max", root=1))
    assert torch.equal(state[0][0], initial(0)[0])
    want = torch.stack([initial(rank)[0] for rank in WORLD]).max(0).values
    assert torch.equal(state[1][0], want)


def test_gathered_parts_are_in_order() -> None:
    for op in ("all_gather", "all_gather_into_tensor"):
        state = run(Step(op, source=0, target=3))
        want = torch.cat([initial(rank)[0][: NUMEL // 3] for rank in WORLD])
        assert torch.equal(state[1][3], want)
    state = run(Step("gather", source=0, target=3, root=2))
    assert torch.equal(state[2][3], want)
    assert torch.equal(state[0][3], initial(0)[3])


def test_scatter_undoes_gather() -> None:
    state = run(Step("gather", source=0, target=1), Step("scatter", source=1, target=2))
    for rank in WORLD:
        assert torch.equal(state[rank][2][: NUMEL // 3], initial(rank)[0][: NUMEL // 3])


def test_reduce_scatter_and_all_gather_make_all_reduce() -> None:
    for op in ("reduce_scatter", "reduce_scatter_tensor"):
        state = run(Step(op, source=0, target=1), Step("all_gather", source=1, target=2))
        want = run(Step("all_reduce", source=0, target=0))[0][0]
        assert torch.equal(state[0][2], want)


def test_all_to_all_twice_is_nothing() -> None:
    for op in ("all_to_all", "all_to_all_single"):
        state = run(Step(op, source=0, target=1), Step(op, source=1, target=2))
        for rank in WORLD:
            assert torch.equal(state[rank][2], initial(rank)[0])


def test_uneven_splits_are_complete_on_both_sides() -> None:
    step = Step("all_to_all_single", source=0, target=1, splits=(7, 0, 5))
    for rank in WORLD:
        assert sum(step.sent(rank, 3)) == sum(step.received(rank, 3)) == NUMEL
    assert step.sent(1, 3) == [5, 7, 0]
    state = run(step)
    want = torch.cat([initial(0)[0][7:7], initial(1)[0][5:12], initial(2)[0][0:5]])
    assert torch.equal(state[1][1], want)


def test_registers_differ() -> None:
    all_registers = [x for rank in WORLD for x in initial(rank)]
    assert len({tuple(x.tolist()) for x in all_registers}) == 3 * REGISTERS

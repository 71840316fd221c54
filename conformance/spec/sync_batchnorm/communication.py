"""Which ranks take part in SyncBatchNorm (groups, eval), and which collectives it issues."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from conformance import (
    Chapter,
    Me,
    Ranks,
    assert_same_on_all_ranks,
    assert_that,
    covers,
    world_sizes,
)
from conformance.harness.traces import Issued, record
from conformance.oracle.batchnorm import whole_batch
from conformance.spec.raising import assert_raised
from conformance.spec.sync_batchnorm.training import (
    Layer,
    Step,
    batches,
    gradients,
    take_step,
    train,
)
from conformance.spec.tolerance import assert_near

chapter = Chapter("sync_batchnorm", needs="feature:sync_batchnorm_on_cpu")


_DOUBLE = Layer(dtype="float64")


def evaluate_on_the_last_rank(me: Me, track: bool) -> None:
    """One rank evaluates while the others wait to be told that it is done."""
    layer = Layer(track=track).make(me).eval()
    if me.rank == me.world_size - 1:
        x = torch.ones(3, 2, device=me.device).requires_grad_()
        layer(x).sum().backward()
        me.store.set("evaluated", "1")
    me.store.wait(["evaluated"])


@chapter.must(
    "sync_batchnorm/silent-eval",
    "Eval mode exchanges nothing, with or without running statistics, in forward and backward: "
    "one rank can evaluate while the others do something else.",
    source="pytorch#56982",
    needs=(),
)
@world_sizes(2, 3)
@pytest.mark.parametrize("track", [True, False], ids=["tracked", "untracked"])
def test_one_rank_evaluates_alone(ranks: Ranks, track: bool) -> None:
    ranks.run(evaluate_on_the_last_rank, track)


def traces_of_eval(me: Me, track: bool) -> list[Issued]:
    """What eval mode issues, forward and backward."""
    group = record()
    layer = Layer(track=track).make(me, group).eval()
    x = torch.ones(3, 2, device=me.device).requires_grad_()
    layer(x).sum().backward()
    return group.take()


@covers("sync_batchnorm/silent-eval")
@world_sizes(2)
@pytest.mark.parametrize("track", [True, False], ids=["tracked", "untracked"])
def test_eval_mode_issues_nothing(ranks: Ranks, track: bool) -> None:
    assert_same_on_all_ranks(ranks.run(traces_of_eval, track), [], what="operations")


def traces_of_training(
    me: Me, x: Tensor, input_requires_grad: bool
) -> tuple[list[Issued], list[Issued]]:
    """What forward and backward issue."""
    group = record()
    layer = Layer(channels=x.size(1)).make(me, group)
    y = layer(x.to(me.device).requires_grad_(input_requires_grad))
    forward = group.take()
    y.sum().backward()
    return forward, group.take()


@chapter.should(
    "sync_batchnorm/one-collective-each-way",
    "Forward issues one collective, and so does backward.",
    source="torch 2.13: one all_gather and one all_reduce; latency is what a small layer costs",
    rests_on="sync_batchnorm/output",
)
@world_sizes(2, 3)
def test_one_collective_each_way(ranks: Ranks) -> None:
    xs = batches([3, 1, 2][: ranks.world_size], (4, 2))
    for rank, (forward, backward) in enumerate(
        ranks.run_each(traces_of_training, [(x, True) for x in xs])
    ):
        for way, trace in (("forward", forward), ("backward", backward)):
            issued = ", ".join(map(str, trace)) or "nothing"
            assert_that(len(trace) == 1, f"{way} issued {issued}", rank)


@chapter.must(
    "sync_batchnorm/small-messages",
    "The amount of data that is exchanged grows with the number of channels, not with the batch.",
    source="torch 2.13: 2C + 1 numbers forward, 2C backward",
    rests_on="sync_batchnorm/output",
)
@world_sizes(2)
def test_messages_do_not_grow_with_the_batch(ranks: Ranks) -> None:
    small, large = (
        ranks.run_each(traces_of_training, [(x, True) for x in batches(sizes, (3, 4))])
        for sizes in ([1, 1], [50, 70])
    )
    assert_same_on_all_ranks(large, small[0], what="operations")
    for trace in small[0]:
        for operation in trace:
            # A few numbers per channel from each rank, and their copies on each rank.
            limit = 2 * ranks.world_size * 4 * 3 + 16
            what = f"{operation} for 3 channels: {operation.numel} numbers, at most {limit} allowed"
            assert_that(operation.numel <= limit, what, 0)


@chapter.should(
    "sync_batchnorm/silent-backward",
    "If no rank's input requires a gradient, backward exchanges nothing.",
    source="torch 2.13, _functions.py: it depends on needs_input_grad",
    rests_on="sync_batchnorm/input-without-gradient",
)
@world_sizes(2)
def test_nobody_asks_for_gradients_of_the_input(ranks: Ranks) -> None:
    got = ranks.run_each(traces_of_training, [(x, False) for x in batches([3, 1], (2, 2))])
    assert_same_on_all_ranks([backward for _, backward in got], [], what="operations of backward")


@chapter.must(
    "sync_batchnorm/same-calls",
    "All ranks issue the same collectives with the same sizes, whatever the sizes of their "
    "batches.",
    source="torch 2.13 docs: collectives are called by all ranks; pytorch#36530",
    rests_on="sync_batchnorm/output",
)
@world_sizes(2, 3)
def test_all_ranks_issue_the_same(ranks: Ranks) -> None:
    xs = batches([3, 0, 1][: ranks.world_size], (2, 2))
    got = ranks.run_each(traces_of_training, [(x, True) for x in xs])
    assert_same_on_all_ranks(got, what="operations")
    for rank, (forward, backward) in enumerate(got):
        for way, trace in (("forward", forward), ("backward", backward)):
            assert_that(bool(trace), f"{way} issued no collective", rank)


def train_in_halves(me: Me, x: Tensor, dy: Tensor) -> Step:
    """A step in the group of even ranks, or in that of odd ones."""
    parts = [list(range(start, me.world_size, 2)) for start in range(2)]
    groups = [dist.new_group(part) for part in parts]
    return take_step(me, _DOUBLE.make(me, groups[me.rank % 2]), x, dy)


@chapter.must(
    "sync_batchnorm/group",
    "With a process_group, the batches of that group's ranks are normalised together, and "
    "separately from those of other groups.",
    source="torch 2.13 docs, SyncBatchNorm, argument process_group",
    rests_on="sync_batchnorm/output",
)
@world_sizes(4, 5)
def test_two_groups_at_once(ranks: Ranks) -> None:
    n = ranks.world_size
    xs = batches([3, 2, 1, 4, 2][:n], (2, 2), "float64")
    dys = gradients(xs)
    got = ranks.run_each(train_in_halves, list(zip(xs, dys, strict=True)))
    for first in (0, 1):
        part, members = slice(first, n, 2), range(first, n, 2)
        want = whole_batch(xs[part], dys[part], _DOUBLE.weight, _DOUBLE.bias_vector)
        assert_near([mine.output for mine in got[part]], want.outputs, "output", members)
        grads = [mine.input_grad for mine in got[part]]
        assert_near(grads, want.input_grads, "gradient of the input", members)


def train_with_outsiders(me: Me, x: Tensor, dy: Tensor) -> Step:
    """A step in the group of all ranks but the first."""
    group = dist.new_group(list(range(1, me.world_size)))
    return take_step(me, _DOUBLE.make(me, group), x, dy)


@covers("sync_batchnorm/group")
@world_sizes(3)
def test_a_group_without_rank_0(ranks: Ranks) -> None:
    xs = batches([3, 2, 1], (2, 2), "float64")
    dys = gradients(xs)
    got = ranks.run_each(train_with_outsiders, list(zip(xs, dys, strict=True)))
    want = whole_batch(xs[1:], dys[1:], _DOUBLE.weight, _DOUBLE.bias_vector)
    assert_near([mine.output for mine in got[1:]], want.outputs, "output in the group", [1, 2])


@chapter.should(
    "sync_batchnorm/outside-of-the-group",
    "On a rank that is not in its group, a layer is plain batch norm.",
    source="torch 2.13: the size of a group for ranks outside of it is -1, hence no exchange",
    rests_on="sync_batchnorm/group",
)
@world_sizes(3)
def test_a_rank_that_is_not_in_the_group(ranks: Ranks) -> None:
    xs = batches([3, 2, 1], (2, 2), "float64")
    dys = gradients(xs)
    got = ranks.run_each(train_with_outsiders, list(zip(xs, dys, strict=True)))
    assert_alone(got[:1], xs[:1], dys[:1])


def train_in_a_later_group(me: Me, x: Tensor, dy: Tensor) -> Step:
    """A second step of a layer that has got the group of all ranks but the first in between."""
    group = dist.new_group(list(range(1, me.world_size)))
    layer: Any = _DOUBLE.make(me)
    take_step(me, layer, x, dy)
    layer.process_group = group
    return take_step(me, layer, x, dy)


@covers("sync_batchnorm/options-changed")
@world_sizes(3)
def test_a_group_that_is_set_later(ranks: Ranks) -> None:
    xs = batches([3, 2, 1], (2, 2), "float64")
    dys = gradients(xs)
    got = ranks.run_each(train_in_a_later_group, list(zip(xs, dys, strict=True)))
    want = whole_batch(xs[1:], dys[1:], _DOUBLE.weight, _DOUBLE.bias_vector)
    assert_near([mine.output for mine in got[1:]], want.outputs, "output", [1, 2])
    grads = [mine.input_grad for mine in got[1:]]
    assert_near(grads, want.input_grads, "gradient of the input", [1, 2])


def assert_alone(got: list[Step], xs: list[Tensor], dys: list[Tensor]) -> None:
    """Every rank got what plain batch norm makes of its own batch."""
    want = [
        whole_batch([x], [dy], _DOUBLE.weight, _DOUBLE.bias_vector)
        for x, dy in zip(xs, dys, strict=True)
    ]
    for part in ("output", "input_grad", "weight_grad", "bias_grad"):
        wanted = [getattr(alone, f"{part}s")[0] for alone in want]
        assert_near([getattr(mine, part) for mine in got], wanted, part.replace("_", " "))


def train_alone(me: Me, x: Tensor, dy: Tensor) -> tuple[Step, list[Issued]]:
    """A step in a group of this rank alone, and what it issued."""
    groups = [record([rank]) for rank in range(me.world_size)]
    step = take_step(me, _DOUBLE.make(me, groups[me.rank]), x, dy)
    return step, groups[me.rank].take()


@chapter.must(
    "sync_batchnorm/alone",
    "In a group of one rank a layer is plain batch norm, and exchanges nothing.",
    source="torch 2.13, SyncBatchNorm.forward: need_sync",
)
@world_sizes(1, 2)
def test_a_group_of_one(ranks: Ranks) -> None:
    xs = batches([3, 2][: ranks.world_size], (2, 2), "float64")
    dys = gradients(xs)
    got = ranks.run_each(train_alone, list(zip(xs, dys, strict=True)))
    assert_alone([step for step, _ in got], xs, dys)
    assert_same_on_all_ranks([trace for _, trace in got], [], what="operations")


def train_without_groups(me: Me, x: Tensor, dy: Tensor) -> tuple[Step, Step]:
    """A step before there is a default group, and one after it is gone."""
    before = take_step(me, _DOUBLE.make(me), x, dy)
    dist.init_process_group(
        me.target.backend,
        store=me.store,
        rank=me.rank,
        world_size=me.world_size,
        pg_options=me.options,
    )
    dist.barrier()
    dist.destroy_process_group()
    return before, take_step(me, _DOUBLE.make(me), x, dy)


@chapter.must(
    "sync_batchnorm/without-groups",
    "Before init_process_group and after destroy_process_group a layer is plain batch norm, on "
    "any device.",
    source="torch 2.13, SyncBatchNorm.forward: need_sync",
    needs=(),
)
@world_sizes(1, 2)
def test_without_a_default_group(bare_ranks: Ranks) -> None:
    xs = batches([3, 2][: bare_ranks.world_size], (2, 2), "float64")
    dys = gradients(xs)
    got = bare_ranks.run_each(train_without_groups, list(zip(xs, dys, strict=True)))
    assert_alone([before for before, _ in got], xs, dys)
    assert_alone([after for _, after in got], xs, dys)


def make_before_groups(me: Me, how: str, x: Tensor) -> Tensor:
    """The output of a layer that is older than the default group."""
    layer = _DOUBLE.make(me)
    if how == "converted":
        plain: Any = nn.BatchNorm1d(2, dtype=torch.float64, device=me.device)
        plain.load_state_dict(layer.state_dict())
        layer = me.sync_batchnorm().convert_sync_batchnorm(plain)
    dist.init_process_group(
        me.target.backend,
        store=me.store,
        rank=me.rank,
        world_size=me.world_size,
        pg_options=me.options,
    )
    y: Tensor = layer(x.to(me.device)).detach()
    dist.barrier()
    dist.destroy_process_group()
    return y


@chapter.must(
    "sync_batchnorm/made-before-groups",
    "A layer that was made or converted before init_process_group normalises over all ranks "
    "from then on.",
    source="torch 2.13, SyncBatchNorm.forward asks for the group whenever it runs",
    rests_on=("sync_batchnorm/output", "sync_batchnorm/without-groups"),
)
@world_sizes(2, 3)
@pytest.mark.parametrize("how", ["made", "converted"])
def test_a_layer_older_than_its_group(bare_ranks: Ranks, how: str) -> None:
    xs = batches([3, 1, 2][: bare_ranks.world_size], (2, 2), "float64")
    got = bare_ranks.run_each(make_before_groups, [(how, x) for x in xs])
    assert_near(got, whole_batch(xs, xs, _DOUBLE.weight, _DOUBLE.bias_vector).outputs, "output")


def train_refused(me: Me, x: Tensor) -> None:
    """A step that may raise; hands on what it raises if the statistics are as before."""
    layer = Layer().make(me)
    fresh = copy.deepcopy(layer.state_dict())
    try:
        layer(x.to(me.device))
    except ValueError:
        for name in ("running_mean", "running_var"):
            same = torch.equal(layer.state_dict()[name], fresh[name])
            assert_that(same, f"{name} was changed by a step that was refused", me.rank)
        raise


@chapter.should(
    "sync_batchnorm/more-than-one-value",
    "If all ranks together have one value per channel, training raises ValueError 'Expected "
    "more than 1 value per channel when training' on every rank, and changes no statistics.",
    source="torch 2.13, batch norm; by its message the rule is about the batch",
    rests_on=("sync_batchnorm/one-value-a-rank", "sync_batchnorm/empty-on-some-ranks"),
)
@world_sizes(1, 2, 3)
@pytest.mark.parametrize("where", ["first", "last"])
@pytest.mark.parametrize("rest", [(), (1, 1)], ids=["2d", "4d"])
def test_one_value_on_all_ranks_together(ranks: Ranks, where: str, rest: tuple[int, ...]) -> None:
    ranks.run(train_refused, torch.ones(2, 2, *rest))  # two values are accepted
    sizes = [0] * ranks.world_size
    sizes[0 if where == "first" else -1] = 1
    outcomes = ranks.outcomes_each(train_refused, [(torch.ones(size, 2, *rest),) for size in sizes])
    assert_raised(
        outcomes, ValueError, match="Expected more than 1 value per channel when training"
    )


@covers("sync_batchnorm/one-value-a-rank")
@world_sizes(2)
def test_two_values_on_one_rank_alone(ranks: Ranks) -> None:
    xs = [batches([2], (2,), "float64")[0], torch.zeros(0, 2, dtype=torch.float64)]
    train(ranks, _DOUBLE, xs).check_outputs()

"""DDP's join(): uneven inputs, how they are divided, early termination, and steps afterwards."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

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
    world_sizes,
)
from conformance.harness.traces import record
from conformance.oracle.data import dtype_named
from conformance.spec.ddp.models import WIDTH, Perceptron, Recipe, Remembering, loss_of, numbered
from conformance.spec.ddp.training_runs import Options, assert_grads
from conformance.spec.raising import assert_raised

DOCS = "torch 2.13 docs, DistributedDataParallel"

chapter = Chapter("ddp")


BYTE = 2**-20
RATE = 0.1


def train_uneven(
    me: Me, steps: int, join: Options, options: Options, every: int = 1
) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients of the first parameter in each synchronised step; parameters at the end."""
    module = Recipe(Perceptron)(seed=me.rank).to(me.device)
    model = me.ddp(module, **options)
    weight = module.get_parameter("layers.0.weight")
    grads = []
    with model.join(**join):
        for i in range(steps):
            synced = (i + 1) % every == 0
            if i % every == 0:
                model.zero_grad()
            with contextlib.nullcontext() if synced else model.no_sync():
                loss_of(model(numbered(me.rank, i).to(me.device))).backward()
            if synced:
                assert weight.grad is not None
                grads.append(weight.grad.clone())
                with torch.no_grad():
                    for p in module.parameters():
                        if p.grad is not None:
                            p.sub_(RATE * p.grad)
    return grads, [p.detach().clone() for p in module.parameters()]


def whole_uneven(
    lengths: list[int], *, by_initial: bool, every: int = 1
) -> tuple[list[Tensor], list[Tensor]]:
    """The same in one process. What a rank accumulates and does not synchronize is lost."""
    module = Recipe(Perceptron)()
    grads = []
    for end in range(every, max(lengths) + 1, every):
        module.zero_grad()
        active = [r for r, length in enumerate(lengths) if end <= length]
        divisor = len(lengths) if by_initial else len(active)
        for r in active:
            for i in range(end - every, end):
                (loss_of(module(numbered(r, i))) / divisor).backward()
        grad = module.get_parameter("layers.0.weight").grad
        assert grad is not None
        grads.append(grad.clone())
        with torch.no_grad():
            for p in module.parameters():
                assert p.grad is not None
                p.sub_(RATE * p.grad)
    return grads, [p.detach() for p in module.parameters()]


def assert_uneven(
    ranks: Ranks, lengths: list[int], join: Options, options: Options, every: int = 1
) -> None:
    got = ranks.run_each(train_uneven, [(n, join, options, every) for n in lengths])
    by_initial = join.get("divide_by_initial_world_size", True)
    grads, params = whole_uneven(lengths, by_initial=by_initial, every=every)
    for rank, (mine, _) in enumerate(got):
        for i, grad in enumerate(mine):
            assert_grads([grad], grads[i], f"gradient of step {i + 1} on rank {rank}")
    for i, param in enumerate(params):
        assert_grads([theirs[i] for _, theirs in got], param, f"parameter {i} at the end")
    assert_same_on_all_ranks([theirs for _, theirs in got], what="parameters at the end")


@chapter.must(
    "ddp/join/uneven-inputs",
    "Inside join(), ranks may take different numbers of steps: the others continue, joined ranks "
    "contribute zeros as gradients, and the sum is divided by the size of the group.",
    source=f"{DOCS}, join",
    rests_on="ddp/average",
)
@world_sizes(2, 3)
def test_different_numbers_of_steps(ranks: Ranks) -> None:
    assert_uneven(ranks, [3, 5, 4][: ranks.world_size], {}, {})


@chapter.must(
    "ddp/join/effective-world-size",
    "With divide_by_initial_world_size=False gradients are divided by the number of ranks that "
    "still have input.",
    source=f"{DOCS}, join; torch 2.13, test_ddp_grad_div_uneven_inputs",
    rests_on="ddp/join/uneven-inputs",
)
@world_sizes(2, 3)
def test_divided_by_those_who_are_left(ranks: Ranks) -> None:
    lengths = [5, 2, 3][: ranks.world_size]
    assert_uneven(ranks, lengths, {"divide_by_initial_world_size": False}, {})


@chapter.must(
    "ddp/join/no-input-at-all",
    "A rank may have no input at all.",
    source=f"{DOCS}, join",
    rests_on="ddp/join/uneven-inputs",
)
@world_sizes(2)
@pytest.mark.parametrize("idle", [0, 1], ids=["rank-0", "rank-1"])
def test_a_rank_without_input(ranks: Ranks, idle: int) -> None:
    assert_uneven(ranks, [0 if r == idle else 3 for r in range(2)], {}, {})


@chapter.must(
    "ddp/join/unused-parameters",
    "join() works with find_unused_parameters and with buckets of several sizes.",
    source="torch 2.13, test_ddp_uneven_inputs",
    rests_on="ddp/join/uneven-inputs",
)
@world_sizes(2)
@pytest.mark.parametrize(
    "options",
    [{"find_unused_parameters": True}, {"bucket_cap_mb": BYTE}, {"gradient_as_bucket_view": True}],
    ids=lambda options: "-".join(options),
)
def test_other_options(ranks: Ranks, options: Options) -> None:
    assert_uneven(ranks, [2, 5], {}, options)


@chapter.must(
    "ddp/join/no-sync",
    "Inside join(), passes may run under no_sync.",
    source="torch 2.13, test_ddp_uneven_inputs: sync_interval",
    rests_on=("ddp/join/uneven-inputs", "ddp/no-sync/accumulates"),
)
@world_sizes(2)
def test_accumulation(ranks: Ranks) -> None:
    assert_uneven(ranks, [2, 6], {}, {}, every=2)


@chapter.must(
    "ddp/join/effective-world-size-accumulated",
    "With divide_by_initial_world_size=False, gradients accumulated under no_sync are divided by "
    "the number of ranks that have input in the synchronised pass.",
    source="torch, distributed.py: each forward counts anew",
    rests_on=("ddp/join/effective-world-size", "ddp/join/no-sync"),
)
@world_sizes(2, 3)
def test_a_rank_joins_while_others_accumulate(ranks: Ranks) -> None:
    lengths = [3, 6, 5][: ranks.world_size]
    assert_uneven(ranks, lengths, {"divide_by_initial_world_size": False}, {}, every=2)


def state_at_the_end(me: Me, steps: int) -> dict[str, Tensor]:
    """Each rank spoils its own parameters, so that what remains is one rank's model."""
    module = Remembering(me.rank)
    for name in ("float32", "bfloat16", "int64"):
        if me.target.capabilities.has(f"dtype:{name}"):
            module.register_buffer(f"as_{name}", torch.zeros(3, dtype=dtype_named(name)))
    model = me.ddp(module.to(me.device))
    with model.join():
        for i in range(steps):
            loss_of(model(numbered(me.rank, i).to(me.device))).backward()
            with torch.no_grad():
                for state in (model.module.layer.weight, *model.buffers()):
                    state.fill_(10 * me.rank + i)
    return dict(model.module.state_dict())


@chapter.must(
    "ddp/join/final-model",
    "At the end all ranks have the model of a rank that joined last, bit by bit, buffers included.",
    source=f"{DOCS}, join; torch 2.13, test_ddp_join_model_equivalence",
    rests_on="ddp/join/uneven-inputs",
)
@world_sizes(2, 3)
def test_the_last_ones_model(ranks: Ranks) -> None:
    lengths = [2, 4, 1][: ranks.world_size]
    for shift in range(2):
        order = lengths[shift:] + lengths[:shift]
        got = ranks.run_each(state_at_the_end, [(n,) for n in order])
        assert_same_on_all_ranks(got, what="state")
        last = 10 * order.index(max(order)) + max(order) - 1
        for name, value in got[0].items():
            if name != "layer.bias":
                assert_that(bool((value == last).all()), f"{name} is {value}, want {last}")


def joins_and_throws(me: Me, steps: int) -> None:
    model = me.ddp(Recipe(Perceptron)().to(me.device))
    with model.join(throw_on_early_termination=True):
        for i in range(steps):
            loss_of(model(numbered(me.rank, i).to(me.device))).backward()


@chapter.must(
    "ddp/join/throw-on-early-termination",
    "With throw_on_early_termination every rank raises RuntimeError as soon as one rank runs "
    "out of input.",
    source=f"{DOCS}, join; torch 2.13, test_ddp_uneven_input_exception",
    needs="dtype:float64",
)
@world_sizes(2, 3)
def test_all_ranks_raise(ranks: Ranks) -> None:
    n = ranks.world_size
    outcomes = ranks.outcomes_each(joins_and_throws, [(1 + r,) for r in range(n)])
    assert_raised(outcomes[:1], RuntimeError, match="Rank 0 exhausted all inputs")
    words = "Detected at least one rank that exhausted inputs"
    assert_raised(outcomes, RuntimeError, match=words, but=[0])


def operations_of_steps(me: Me, with_join: bool) -> list[str]:
    group = record()
    model = me.ddp(Recipe(Perceptron)().to(me.device), process_group=group)
    group.take()
    with model.join(enable=False) if with_join else contextlib.nullcontext():
        for i in range(3):
            model.zero_grad()
            loss_of(model(numbered(me.rank, i).to(me.device))).backward()
    return [str(issued) for issued in group.take()]


@chapter.must(
    "ddp/join/disabled",
    "join(enable=False) has no effect: steps are the same as without it, and issue the same "
    "collectives.",
    source=f"{DOCS}, join; torch 2.13, test_ddp_uneven_input_join_disable",
    rests_on="ddp/average",
)
@world_sizes(2)
def test_disabled(ranks: Ranks) -> None:
    assert_uneven(ranks, [3, 3], {"enable": False}, {})
    want = ranks.run(operations_of_steps, False)[0]
    assert_same_on_all_ranks(ranks.run(operations_of_steps, True), want, what="operations")


def logged_join(me: Me) -> int:
    model = me.ddp(Recipe(Perceptron)().to(me.device))
    with model.join():
        loss_of(model(numbered(me.rank, 0).to(me.device))).backward()
    used: int = model._get_ddp_logging_data()["join_uneven_inputs"]
    return used


@chapter.should(
    "ddp/join/logged",
    "The logging data contain join_uneven_inputs after join() was used.",
    source="torch 2.13, test_ddp_uneven_inputs",
    needs="dtype:float64",
)
@world_sizes(2)
def test_the_logging_data_say_so(ranks: Ranks) -> None:
    assert_same_on_all_ranks(ranks.run(logged_join), 1, what="join_uneven_inputs")


def epochs(me: Me, lengths: list[int]) -> list[Tensor]:
    """A gradient after each of two steps without join(), after each of two epochs with it."""
    module = Recipe(Perceptron, ((WIDTH, 1),))().to(me.device)
    model = me.ddp(module)
    x = torch.full((1, WIDTH), 1.0 + 2 * me.rank, dtype=torch.float64, device=me.device)
    seen = []
    for steps in lengths:
        with model.join():
            for _ in range(steps):
                model(x).sum().backward()
        for _ in range(2):
            model.zero_grad()
            model(x).sum().backward()
            grad = module.get_parameter("layers.0.weight").grad
            assert grad is not None
            seen.append(grad.clone())
    return seen


@chapter.must(
    "ddp/join/afterwards",
    "Steps after join() average as those without it, also on ranks that ran out of input early, "
    "and join() may be used again.",
    source=f"{DOCS}, join: one for each epoch",
    rests_on="ddp/join/uneven-inputs",
)
@world_sizes(2)
def test_steps_after_join(ranks: Ranks) -> None:
    got = ranks.run_each(epochs, [([1, 3],), ([3, 2],)])
    want = [torch.full((1, WIDTH), 2.0, dtype=torch.float64)] * 4
    assert_same_on_all_ranks(got, want, what="gradients after join()")


def divided(me: Me, by_initial: Sequence[bool]) -> list[float]:
    """A gradient of the last step of each join(), in which rank 1 is alone."""
    module = nn.Linear(WIDTH, 1, bias=False).double().to(me.device)
    model = me.ddp(module)
    x = torch.full((1, WIDTH), 1.0 + 2 * me.rank, dtype=torch.float64, device=me.device)
    seen = []
    for initial in by_initial:
        with model.join(divide_by_initial_world_size=initial):
            for _ in range(1 + me.rank):
                model.zero_grad()
                model(x).sum().backward()
        assert module.weight.grad is not None
        seen.append(module.weight.grad[0, 0].item())
    return seen


@chapter.must(
    "ddp/join/another-division",
    "Each join() divides as its own divide_by_initial_world_size says, whatever one before said.",
    source=f"{DOCS}, join",
    rests_on=("ddp/join/uneven-inputs", "ddp/join/effective-world-size"),
)
@world_sizes(2)
@pytest.mark.parametrize("first", [True, False], ids=["initial first", "effective first"])
def test_joins_that_divide_otherwise(ranks: Ranks, first: bool) -> None:
    alone = ranks.run(divided, [first, not first])[1]
    want = [1.5, 3.0] if first else [3.0, 1.5]
    assert_that(alone == want, f"gradients of steps alone: {alone}, want {want}", 1)


def join_in_a_group(me: Me, lengths: list[int]) -> tuple[int, float] | None:
    """Steps of the joined group's ranks; whose model the last one's was. None outside."""
    group = dist.new_group([1, 2])
    if me.rank == 0:
        return None
    module = Remembering(me.rank).to(me.device)
    model = me.ddp(module, process_group=group)
    with model.join():
        for i in range(lengths[me.rank - 1]):
            loss_of(model(numbered(me.rank, i).to(me.device))).backward()
    return lengths[me.rank - 1], module.whose.item()


@chapter.must(
    "ddp/join/group",
    "join() involves only the wrapper's group, whichever ranks are in it.",
    source=f"{DOCS}, join and process_group",
    rests_on=("ddp/join/uneven-inputs", "ddp/process-group"),
)
@world_sizes(3)
@pytest.mark.parametrize("lengths", [[1, 3], [3, 1]], ids=str)
def test_join_in_a_group_without_rank_0(ranks: Ranks, lengths: list[int]) -> None:
    last = 1.0 + lengths.index(max(lengths))
    want = [None, (lengths[0], last), (lengths[1], last)]
    for rank, (got, wanted) in enumerate(
        zip(ranks.run(join_in_a_group, lengths), want, strict=True)
    ):
        assert_that(got == wanted, f"steps and last rank: {got}, want {wanted}", rank)

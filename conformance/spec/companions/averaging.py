"""Averages of whole models, now and then: periodic, in a hierarchy of groups, after local steps."""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.model_averaging import (
    averagers,
    hierarchical_model_averager,
)

from conformance import Chapter, Me, Ranks, world_sizes
from conformance.spec.companions.facts import about, data_of, parameters, quietly, refusal
from conformance.spec.facts import Fact, check_fact, rows, unlike

chapter = Chapter(
    "companions",
    source="torch 2.13, torch.distributed.algorithms.model_averaging",
    needs=("op:all_reduce", "reduce_op:sum", "device:synchronize"),
)

SIZES = ((3, 2), (5,), (1,))
STEPS = 9


def periodic(period: int, warmup_steps: int = 0, group: Any = None) -> Any:
    make = averagers.PeriodicModelAverager
    return quietly(lambda: make(period, warmup_steps, process_group=group))


def hierarchical(periods: Sequence[tuple[int, int]], warmup_steps: int = 0) -> Any:
    """periods: pairs of period and size of group."""
    make: Any = hierarchical_model_averager.HierarchicalModelAverager
    return quietly(lambda: make(OrderedDict(periods), warmup_steps))


def of_rank(me: Me, rank: int) -> list[Any]:
    """The parameters that a rank begins with, each with a gradient. None is negative: a sum of
    such numbers is the same in any order but for rounding."""
    params = parameters(me, SIZES, seed=rank)
    for param in params:
        param.data.abs_()
        param.grad = torch.ones_like(param)
    return params


def moved(data: list[Tensor], rank: int) -> list[Tensor]:
    """What a rank's own step makes of parameters."""
    return [x + (rank + 1) / 4 for x in data]


def mean(models: Sequence[list[Tensor]]) -> list[Tensor]:
    return [sum(x / len(models) for x in same) for same in zip(*models, strict=True)]


def simulated(me: Me, members_at: Callable[[int, int], Sequence[int]]) -> list[list[Tensor]]:
    """This rank's model after each step.

    members_at: step and rank -> the ranks whose average that rank then has; none for no average.
    """
    models = [data_of(of_rank(me, rank)) for rank in range(me.world_size)]
    mine = []
    for step in range(STEPS):
        models = [moved(data, rank) for rank, data in enumerate(models)]
        averages = {}
        for rank in range(me.world_size):
            if members := members_at(step, rank):
                averages[rank] = mean([models[member] for member in members])
        models = [averages.get(rank, model) for rank, model in enumerate(models)]
        mine.append(models[me.rank])
    return mine


def averaged(me: Me, averager: Any, given: Any = list) -> list[list[Tensor]]:
    """This rank's model after each step and average.

    given: what the averager is given, from the parameters.
    """
    params, seen = of_rank(me, me.rank), []
    for _ in range(STEPS):
        with torch.no_grad():
            for param in params:
                param += (me.rank + 1) / 4
        averager.average_parameters(given(params))
        seen.append(data_of(params))
    return seen


def by_period(me: Me, period: int, warmup_steps: int) -> list[str]:
    def members_at(step: int, rank: int) -> Sequence[int]:
        is_due = step >= warmup_steps and (step - warmup_steps) % period == 0
        return range(me.world_size) if is_due else ()

    got = averaged(me, periodic(period, warmup_steps))
    return about("models after each step", got, simulated(me, members_at))


@chapter.must(
    "averaging/periodic",
    "PeriodicModelAverager averages in its first call after warmup_steps calls, then in each "
    "period-th one, and in no other.",
)
@world_sizes(2, 3)
@pytest.mark.parametrize(("period", "warmup"), [(1, 0), (2, 0), (3, 2), (4, 5)])
def test_periodic(ranks: Ranks, period: int, warmup: int) -> None:
    check_fact(ranks, by_period, period, warmup)


PAIRS_AND_ALL = ((2, 2), (4, 4))


def by_hierarchy(me: Me, warmup_steps: int) -> list[str]:
    def members_at(step: int, rank: int) -> Sequence[int]:
        if step < warmup_steps or step % 2:
            return ()
        return range(4) if step % 4 == 0 else (rank // 2 * 2, rank // 2 * 2 + 1)

    got = averaged(me, hierarchical(PAIRS_AND_ALL, warmup_steps))
    return about("models after each step", got, simulated(me, members_at))


@chapter.must(
    "averaging/hierarchical",
    "HierarchicalModelAverager averages, after warmup_steps calls, in the group of the greatest "
    "period that divides the number of calls before, and in that alone.",
    rests_on="averaging/periodic",
)
@world_sizes(4)
@pytest.mark.parametrize("warmup", [0, 3])
def test_hierarchical(ranks: Ranks, warmup: int) -> None:
    check_fact(ranks, by_hierarchy, warmup)


def each(me: Me, members: Sequence[int]) -> Callable[[int, int], Sequence[int]]:
    return lambda _, rank: members if rank in members else ()


def in_groups(params: list[Any]) -> list[dict[str, Any]]:
    return [{"params": params[:1], "lr": 1.0}, {"params": params[1:]}]


def generator(me: Me) -> list[str]:
    got = averaged(me, periodic(1), iter)
    return about("models", got, simulated(me, each(me, range(me.world_size))))


def parameter_groups(me: Me) -> list[str]:
    got = averaged(me, periodic(1), in_groups)
    return about("models", got, simulated(me, each(me, range(me.world_size))))


def subgroup(me: Me) -> list[str]:
    group: Any = dist.new_group([2, 0])
    if me.rank == 1:
        return []
    return about("models", averaged(me, periodic(1, 0, group)), simulated(me, each(me, (0, 2))))


def dtypes(me: Me) -> list[str]:
    """Parameters of several dtypes at once; all of them hold these numbers exactly."""
    kinds = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
    mine, want = 3.0 * me.rank, 1.5 * (me.world_size - 1)
    params: list[Any] = [
        torch.nn.Parameter(torch.full((2,), mine, dtype=kind, device=me.device)) for kind in kinds
    ]
    for param in params:
        param.grad = torch.ones_like(param)
    periodic(1).average_parameters(iter(params))
    average = [torch.full((2,), want, dtype=kind) for kind in kinds]
    return unlike("parameters", data_of(params), average)


def without_gradients(me: Me) -> list[str]:
    params = of_rank(me, me.rank)
    params[1].grad = None
    before = data_of(params)
    periodic(1).average_parameters(iter(params))
    same = mean([data_of(of_rank(me, rank)) for rank in range(me.world_size)])
    return about("parameters", data_of(params), [same[0], before[1], same[2]])


def gradients_on_some_ranks(me: Me) -> list[str]:
    """Two parameters of one size, of which each rank has used another one."""
    params = [torch.nn.Parameter(torch.full((2,), 10.0 * i, device=me.device)) for i in (1, 2)]
    params[me.rank % 2].grad = torch.ones(2, device=me.device)
    before = data_of(params)
    if refusal(lambda: periodic(1).average_parameters(iter(params)), Exception).startswith("(n"):
        # Equal on all ranks, they are their own averages.
        return about("parameters", data_of(params), before)
    return []


def same_objects(me: Me) -> list[str]:
    params = of_rank(me, me.rank)
    kept = [(id(param), param.shape, param.requires_grad, id(param.grad)) for param in params]
    periodic(1).average_parameters(iter(params))
    now = [(id(param), param.shape, param.requires_grad, id(param.grad)) for param in params]
    return unlike("parameters", now, kept)


def wrong_settings(me: Me) -> list[str]:
    every: list[tuple[str, Callable[[], Any]]] = [
        ("warmup_steps=-1", lambda: periodic(2, -1)),
        ("period=0", lambda: periodic(0)),
        ("no periods", lambda: hierarchical([])),
        ("period 0 in a hierarchy", lambda: hierarchical([(0, me.world_size)])),
        ("a last group that is not whole", lambda: hierarchical([(2, me.world_size + 1)])),
        ("warmup_steps=-1 in a hierarchy", lambda: hierarchical([(2, me.world_size)], -1)),
    ]
    said = [(what, refusal(call, ValueError)) for what, call in every]
    return [f"{what}: {text}" for what, text in said if text.startswith("(")]


def after_local_steps(params: list[Any], averager: Any) -> Any:
    from torch.distributed.optim import PostLocalSGDOptimizer  # which warns of torch.jit

    return PostLocalSGDOptimizer(torch.optim.SGD(params, 0.5, momentum=0.5), averager)


def make_local(me: Me, averager: Any) -> tuple[Any, list[Any]]:
    params = of_rank(me, me.rank)
    return quietly(lambda: after_local_steps(params, averager)), params


def local_models(me: Me, steps: int, period: int, warmup_steps: int) -> list[Tensor]:
    """What each rank should have in the end, from SGD of all ranks and averages."""
    models = [of_rank(me, rank) for rank in range(me.world_size)]
    optimizers = [torch.optim.SGD(params, 0.5, momentum=0.5) for params in models]
    for step in range(steps):
        for rank, params in enumerate(models):
            for param in params:
                param.grad = torch.full_like(param, -(rank + 1.0 + step))
            optimizers[rank].step()
        if step >= warmup_steps and (step - warmup_steps) % period == 0:
            same = mean([data_of(params) for params in models])
            with torch.no_grad():
                for params in models:
                    for param, value in zip(params, same, strict=True):
                        param.copy_(value)
    return data_of(models[me.rank])


def local_steps(me: Me, optimizer: Any, params: list[Any], first: int, steps: int) -> None:
    for step in range(first, first + steps):
        for param in params:
            param.grad = torch.full_like(param, -(me.rank + 1.0 + step))
        optimizer.step()


def local_sgd(me: Me) -> list[str]:
    optimizer, params = make_local(me, periodic(3, 2))
    local_steps(me, optimizer, params, 0, 7)
    return about("parameters", data_of(params), local_models(me, 7, 3, 2))


def local_state(me: Me) -> list[str]:
    """The averager's step is in the state: training that is resumed averages when it is due."""
    optimizer, params = make_local(me, periodic(3, 2))
    local_steps(me, optimizer, params, 0, 4)
    state = copy.deepcopy(optimizer.state_dict())
    resumed, after = make_local(me, periodic(3, 2))
    resumed.load_state_dict(state)
    with torch.no_grad():
        for param, old in zip(after, params, strict=True):
            param.copy_(old)
    local_steps(me, resumed, after, 4, 3)
    found = unlike("step in the state", state.get("step"), 4)
    return found + about("parameters", data_of(after), local_models(me, 7, 3, 2))


def state_without_a_step(me: Me) -> list[str]:
    """One that an optimizer without averages has saved, loaded when three steps are done."""
    optimizer, params = make_local(me, periodic(3, 2))
    local_steps(me, optimizer, params, 0, 3)
    state = {name: x for name, x in optimizer.state_dict().items() if name != "step"}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        optimizer.load_state_dict(state)
    words = [str(warning.message) for warning in told]
    found = [] if any("step counter" in text for text in words) else [f"warnings: {words}"]
    return found + unlike("step", optimizer.state_dict().get("step"), 0)


def local_is_an_optimizer(me: Me) -> list[str]:
    """What training loops do with an optimizer: rates, groups, states, schedulers, zero_grad."""
    optimizer, params = make_local(me, periodic(100, 50))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    local_steps(me, optimizer, params, 0, 1)
    quietly(schedule.step)
    optimizer.zero_grad()
    found = unlike("gradients", [param.grad for param in params], [None] * len(params))
    found += unlike("rate", optimizer.param_groups[0]["lr"], 0.25)
    found += unlike("states", len(optimizer.state), len(params))
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))], "lr": 1.0})
    return found + unlike("groups", [g["lr"] for g in optimizer.param_groups], [0.25, 1.0])


def local_hooks(me: Me) -> list[str]:
    optimizer, params = make_local(me, periodic(100, 50))
    called: list[str] = []
    try:
        optimizer.register_step_pre_hook(lambda *_: called.append("before"))
        optimizer.register_step_post_hook(lambda *_: called.append("after"))
    except Exception as error:
        return [f"{type(error).__name__}: {error}"]
    local_steps(me, optimizer, params, 0, 1)
    return unlike("calls", called, ["before", "after"])


FACTS = rows(
    (
        chapter.must(
            "averaging/iterators",
            "The parameters may come one by one, as from a model's parameters().",
            rests_on="averaging/periodic",
        ),
        generator,
    ),
    (
        chapter.must(
            "averaging/groups",
            "The groups of an optimizer are averaged like a list of all their parameters.",
            rests_on="averaging/periodic",
        ),
        parameter_groups,
    ),
    (
        chapter.must(
            "averaging/subgroup",
            "With a process_group, models are averaged over its ranks alone.",
            rests_on="averaging/periodic",
        ),
        subgroup,
    ),
    (
        chapter.must(
            "averaging/dtypes",
            "Parameters of several dtypes are averaged together, and keep theirs.",
            needs=(
                *("op:all_reduce", "reduce_op:sum", "device:synchronize"),
                *("dtype:float64", "dtype:float16", "dtype:bfloat16"),
            ),
            rests_on="averaging/periodic",
        ),
        dtypes,
    ),
    (
        chapter.must(
            "averaging/without-gradients",
            "A parameter that has a gradient on no rank is left as it is.",
            rests_on="averaging/periodic",
        ),
        without_gradients,
    ),
    (
        chapter.should(
            "averaging/gradients-on-some-ranks",
            "Where parameters have gradients on some ranks alone, none of them is averaged with "
            "another parameter.",
            rests_on="averaging/without-gradients",
        ),
        gradients_on_some_ranks,
    ),
    (
        chapter.must(
            "averaging/same-objects",
            "Parameters stay the objects that they are, with their gradients.",
        ),
        same_objects,
    ),
    (
        chapter.must(
            "averaging/refused",
            "A negative warm-up, a period below 1, no periods, and a hierarchy whose last group is "
            "not the whole one are a ValueError.",
        ),
        wrong_settings,
    ),
    (
        chapter.must(
            "local_sgd/trains",
            "PostLocalSGDOptimizer steps the local optimizer and then averages when it is due.",
            rests_on="averaging/periodic",
        ),
        local_sgd,
    ),
    (
        chapter.must(
            "local_sgd/state",
            "Its state has the averager's step, and training that is resumed from it averages "
            "when it would have.",
            rests_on="local_sgd/trains",
        ),
        local_state,
    ),
    (
        chapter.must(
            "local_sgd/state-without-a-step",
            "A state without the averager's step is loaded with a warning that names the step "
            "counter, and the averager begins at 0 again.",
            source="torch 2.13 docs, PostLocalSGDOptimizer.load_state_dict",
            rests_on="local_sgd/state",
        ),
        state_without_a_step,
    ),
    (
        chapter.must(
            "local_sgd/as-an-optimizer",
            "zero_grad, add_param_group, param_groups, state and a scheduler act on the local "
            "optimizer.",
            rests_on="local_sgd/trains",
        ),
        local_is_an_optimizer,
    ),
    (
        chapter.should(
            "local_sgd/step-hooks",
            "Hooks that are registered on it are called around each step.",
            source="torch 2.13 docs, Optimizer.register_step_pre_hook",
            rests_on="local_sgd/trains",
        ),
        local_hooks,
    ),
)


@world_sizes(3)
@pytest.mark.parametrize("fact", FACTS)
def test_averaging(ranks: Ranks, fact: Fact) -> None:
    check_fact(ranks, fact)

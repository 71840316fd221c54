"""ZeroRedundancyOptimizer: it trains like the optimizer that it shards, and each rank has a part.

The oracle is the optimizer itself, on copies of the parameters, in the same process.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from conformance import Chapter, Me, Ranks, assert_that, world_sizes
from conformance.spec.companions.facts import (
    SIZES,
    about,
    data_of,
    parameters,
    quietly,
    refusal,
    set_gradients,
)
from conformance.spec.facts import Fact, check_fact, rows, unlike

chapter = Chapter(
    "companions",
    source="torch 2.13 docs, Distributed Optimizers: ZeroRedundancyOptimizer",
    # States are copied to the host without waiting.
    needs=("op:broadcast", "dtype:uint8", "dtype:int64", "device:pinned_memory"),
)

SGD = {"lr": 0.1, "momentum": 0.9}
ADAM = {"lr": 0.01, "weight_decay": 0.1}
STEPS = 3

# What an optimizer is given: parameters, or groups of them.
Given = Callable[[list[Any]], Any]


def sharded(given: Any, kind: Any, **options: Any) -> Any:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # which warns of torch.jit

    return ZeroRedundancyOptimizer(given, kind, **options)


def all_of(params: list[Any]) -> Any:
    return params


def in_groups(params: list[Any]) -> Any:
    """Three groups, one of a single parameter; what a group does not say is said for all."""
    return [
        {"params": params[:3], "lr": 0.5},
        {"params": params[3:4], "weight_decay": 0.0, "lr": 0.02},
        {"params": params[4:], "betas": (0.5, 0.6)},
    ]


class Pair:
    """The sharded optimizer and the plain one, each with parameters of its own."""

    def __init__(
        self,
        me: Me,
        given: Given = all_of,
        sizes: Sequence[tuple[int, ...]] = SIZES,
        kind: Any = torch.optim.Adam,
        options: dict[str, Any] = ADAM,
        **how: Any,
    ) -> None:
        self.params, self.plain_params = parameters(me, sizes), parameters(me, sizes)
        self.zero = quietly(lambda: sharded(given(self.params), kind, **options, **how))
        self.plain = kind(given(self.plain_params), **options)
        self.steps = 0

    @property
    def both(self) -> list[tuple[Any, list[Any]]]:
        return [(self.zero, self.params), (self.plain, self.plain_params)]

    def train(self, steps: int = STEPS) -> None:
        for _ in range(steps):
            for optimizer, params in self.both:
                set_gradients(params, self.steps)
                optimizer.step()
            self.steps += 1

    def differences(self, what: str = "parameters") -> list[str]:
        return about(what, data_of(self.params), data_of(self.plain_params))

    def state_differences(self, to: int, is_there: bool) -> list[str]:
        """On rank `to` of the group, which is here or not, in the whole state."""
        self.zero.consolidate_state_dict(to=to)
        if not is_there:
            return []
        got, want = sorted_state(self.zero), sorted_state(self.plain)
        return about(f"state on rank {to}", got, want)


def sorted_state(optimizer: Any) -> dict[str, Any]:
    """Its state_dict, with the options of each group in order of their names."""
    state = optimizer.state_dict()
    groups = [dict(sorted(group.items())) for group in state["param_groups"]]
    states = {place: dict(sorted(state["state"][place].items())) for place in state["state"]}
    return {"state": states, "param_groups": groups}


def trains_alike(me: Me, kind: Any, options: dict[str, Any], views: bool) -> list[str]:
    pair = Pair(me, kind=kind, options=options, parameters_as_bucket_view=views)
    pair.train()
    return pair.differences()


@chapter.must(
    "zero/trains-alike",
    "Parameters are after each step what the optimizer that is sharded would make of them, on all "
    "ranks, whether or not they are views of buckets.",
)
@world_sizes(1, 2, 3, 4)
@pytest.mark.parametrize("views", [False, True], ids=["apart", "views"])
@pytest.mark.parametrize(
    ("kind", "options"),
    [(torch.optim.SGD, SGD), (torch.optim.AdamW, ADAM)],
    ids=["sgd", "adamw"],
)
def test_it_trains_alike(ranks: Ranks, kind: Any, options: dict[str, Any], views: bool) -> None:
    check_fact(ranks, trains_alike, kind, options, views)


def share(me: Me, given: str) -> list[int]:
    """The places of the parameters of which this rank has a state."""
    pair = Pair(me, in_groups if given == "groups" else all_of)
    pair.train()
    places = {id(param): place for place, param in enumerate(pair.params)}
    return sorted(places[id(param)] for param in pair.zero.optim.state)


@chapter.must(
    "zero/shares",
    "Each parameter's state is on one rank, and no rank has more of them than one parameter above "
    "its even share of all elements.",
    rests_on="zero/trains-alike",
)
@world_sizes(2, 3, 4)
@pytest.mark.parametrize("given", ["parameters", "groups"])
def test_shares(ranks: Ranks, given: str) -> None:
    got = ranks.run(share, given)
    places = sorted(place for part in got for place in part)
    assert_that(places == list(range(len(SIZES))), f"states of the parameters {places} in all")
    numel = [torch.Size(size).numel() for size in SIZES]
    most = sum(numel) / ranks.world_size + max(numel)
    for rank, part in enumerate(got):
        mine = sum(numel[place] for place in part)
        assert_that(mine <= most, f"{mine} of {sum(numel)} elements, at most {most:g}", rank)


def groups(me: Me) -> list[str]:
    """Rates that are changed on the way, as a scheduler does, included."""
    pair = Pair(me, in_groups)
    pair.train()
    for optimizer, _ in pair.both:
        optimizer.param_groups[0]["lr"] = 0.001
        optimizer.param_groups[2]["weight_decay"] = 0.7
    pair.train()
    return pair.differences()


def scheduler(me: Me) -> list[str]:
    pair, rates = Pair(me, in_groups), []
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 1, 0.5) for o, _ in pair.both]
    for _ in range(STEPS):
        pair.train(1)
        for one in schedulers:
            one.step()
        rates.append([[group["lr"] for group in o.param_groups] for o, _ in pair.both])
    return pair.differences() + unlike("rates", [a for a, _ in rates], [b for _, b in rates])


def added_group(me: Me) -> list[str]:
    found = []
    for views in (False, True):
        pair = Pair(me, lambda params: params[:2], parameters_as_bucket_view=views)
        pair.train(1)
        for optimizer, params in pair.both:
            optimizer.add_param_group({"params": params[2:], "lr": 0.3})
        pair.train()
        found += pair.differences(f"parameters, {views=}")
    return found


def frozen(me: Me) -> list[str]:
    """One parameter that is never trained, and one that has no gradient now and then."""
    pair = Pair(me)
    for _, params in pair.both:
        params[1].requires_grad_(False)
    pair.train(1)
    for step in (7, 8):
        for optimizer, params in pair.both:
            set_gradients(params, step)
            params[4 if step == 7 else 0].grad = None
            optimizer.step()
    pair.train(1)
    return pair.differences()


def thawed(me: Me) -> list[str]:
    """What is trained changes between the steps."""
    found = []
    for views in (False, True):
        pair = Pair(me, parameters_as_bucket_view=views)
        for trained in (True, False, True):
            for _, params in pair.both:
                for param in params[::2]:
                    param.requires_grad_(trained)
            pair.train(1)
        found += pair.differences(f"parameters, {views=}")
    return found


def few_parameters(me: Me) -> list[str]:
    """Fewer than ranks: some have no share."""
    pair = Pair(me, sizes=((3, 2),))
    pair.train()
    last = me.world_size - 1
    return pair.differences() + pair.state_differences(last, me.rank == last)


def closure(me: Me) -> list[str]:
    pair = Pair(me)
    returned = []
    for optimizer, params in pair.both:
        set_gradients(params, 0)
        returned.append(optimizer.step(lambda: 2.5))
    return unlike("returned", returned, [2.5, 2.5]) + pair.differences()


def zeroed(me: Me) -> list[str]:
    """All gradients, not only those of this rank's share."""
    pair = Pair(me)
    set_gradients(pair.params, 0)
    pair.zero.zero_grad(set_to_none=False)
    found = unlike("sums", [param.grad.abs().sum().item() for param in pair.params], [0.0] * 6)
    pair.zero.zero_grad()
    return found + unlike("gradients", [param.grad for param in pair.params], [None] * 6)


def same_objects(me: Me) -> list[str]:
    """A model keeps its parameters, and they are where the optimizer writes."""
    found = []
    for views in (False, True):
        pair = Pair(me, in_groups, parameters_as_bucket_view=views)
        kept = [id(param) for group in pair.zero.param_groups for param in group["params"]]
        found += unlike("parameters", kept, [id(param) for param in pair.params])
        found += pair.differences("what they hold before the first step")
    return found


def options_of_groups(me: Me) -> list[str]:
    pair = Pair(me, in_groups)
    want = [{key: g[key] for key in g if key != "params"} for g in pair.plain.param_groups]
    groups = zip(pair.zero.param_groups, want, strict=True)
    return unlike("groups", [{key: g.get(key) for key in plain} for g, plain in groups], want)


def subgroup(me: Me) -> list[str]:
    """Ranks 2 and 1, of three: their numbers in the group are others."""
    group: Any = dist.new_group([2, 1])
    if me.rank == 0:
        return []
    pair = Pair(me, in_groups, process_group=group)
    pair.train()
    return pair.differences() + pair.state_differences(1, dist.get_group_rank(group, me.rank) == 1)


def consolidated(me: Me, given: Given, views: bool = False) -> list[str]:
    pair = Pair(me, given, parameters_as_bucket_view=views)
    found: list[str] = []
    for to in range(me.world_size):
        pair.train(1)
        found += pair.state_differences(to, me.rank == to)
    return found


def consolidated_state(me: Me) -> list[str]:
    return consolidated(me, all_of) + consolidated(me, all_of, views=True)


def consolidated_groups(me: Me) -> list[str]:
    return consolidated(me, in_groups) + consolidated(me, lambda params: in_groups(params)[::-1])


def consolidated_after_change(me: Me) -> list[str]:
    """Of an optimizer with a frozen parameter, a group that came later, and a new rate."""
    pair = Pair(me, lambda params: params[:4])
    for optimizer, params in pair.both:
        params[0].requires_grad_(False)
        optimizer.add_param_group({"params": params[4:], "lr": 0.3})
    pair.train()
    for optimizer, _ in pair.both:
        optimizer.param_groups[0]["lr"] = 0.25
    return pair.state_differences(0, me.rank == 0)


def not_consolidated(me: Me) -> list[str]:
    pair = Pair(me)
    pair.train(1)
    before = refusal(pair.zero.state_dict, RuntimeError)
    pair.zero.consolidate_state_dict(to=1)
    found = [] if f"to={me.rank}" in before else [f"before it was consolidated: {before}"]
    if me.rank != 1:
        after = refusal(pair.zero.state_dict, RuntimeError)
        found += [] if f"to={me.rank}" in after else [f"of another rank's: {after}"]
    return found


def no_such_rank(me: Me) -> list[str]:
    """The state would be sent to all ranks, and none would keep it."""
    pair, found = Pair(me), []
    pair.train(1)
    for to in (me.world_size, -1):
        said = refusal(partial(pair.zero.consolidate_state_dict, to=to), Exception)
        found += [f"to={to}: {said}"] if said.startswith("(") else []
    return found


def resumed(me: Me, given: Given, views: bool = False) -> list[str]:
    """With the plain optimizer's state, which all ranks have."""
    pair = Pair(me, given)
    pair.train()
    after = Pair(me, given, parameters_as_bucket_view=views)
    for (optimizer, params), (_, before) in zip(after.both, pair.both, strict=True):
        with torch.no_grad():
            for param, old in zip(params, before, strict=True):
                param.copy_(old)
        optimizer.load_state_dict(copy.deepcopy(pair.plain.state_dict()))
    after.steps = pair.steps
    after.train()
    return after.differences(f"parameters, {views=}")


def loads(me: Me) -> list[str]:
    return [text for views in (False, True) for text in resumed(me, all_of, views)]


def loads_groups(me: Me) -> list[str]:
    return resumed(me, in_groups)


def loads_where_it_came_from(me: Me) -> list[str]:
    """Consolidated, loaded on all ranks and consolidated again, without a step between."""
    pair = Pair(me, in_groups)
    pair.train()
    pair.zero.consolidate_state_dict(to=0)
    state = [pair.zero.state_dict() if me.rank == 0 else None]
    dist.broadcast_object_list(state, 0)
    pair.zero = Pair(me, in_groups).zero
    pair.zero.load_state_dict(state[0])
    return pair.state_differences(1, me.rank == 1)


def leaves_what_it_loads(me: Me) -> list[str]:
    pair = Pair(me)
    pair.train()
    state = pair.plain.state_dict()
    pair.zero.load_state_dict(state)
    missing = [place for place, value in state["state"].items() if value is None]
    return [f"the states {missing} of what was loaded are None now"] if missing else []


def not_to_be_sharded(me: Me) -> list[str]:
    def sgd(given: Any) -> Any:
        return lambda: sharded(given, torch.optim.SGD, lr=0.1)

    one = nn.Parameter(torch.zeros(2, device=me.device))
    other = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16, device=me.device))
    wrong: list[tuple[str, Any, type[Exception]]] = [
        ("a tensor", one, TypeError),
        ("a number", 3, TypeError),
        ("nothing", [], ValueError),
        ("a tensor and a group", [one, {"params": [other]}], TypeError),
        ("a group without parameters", [{"lr": 1.0}], ValueError),
        ("two dtypes", [one, other], ValueError),
    ]
    said = [(what, refusal(sgd(given), kind)) for what, given, kind in wrong]
    return [f"{what}: {text}" for what, text in said if text.startswith("(")]


@world_sizes(3)
@pytest.mark.parametrize(
    "fact",
    rows(
        (
            chapter.must(
                "zero/groups",
                "Each group of parameters is trained by its own options, also if they are changed "
                "between steps.",
                rests_on="zero/trains-alike",
            ),
            groups,
        ),
        (
            chapter.must(
                "zero/scheduler",
                "A learning rate scheduler on the sharded optimizer has the effect that it has on "
                "the optimizer itself.",
                rests_on="zero/groups",
            ),
            scheduler,
        ),
        (
            chapter.must(
                "zero/added-group",
                "A group that is added between steps is trained from then on, on all ranks.",
                rests_on="zero/trains-alike",
            ),
            added_group,
        ),
        (
            chapter.must(
                "zero/without-gradients",
                "A parameter that is frozen or has no gradient is left as it is, and the others "
                "are trained.",
                rests_on="zero/trains-alike",
            ),
            frozen,
        ),
        (
            chapter.must(
                "zero/thawed",
                "Parameters may be frozen and thawed between steps, whether or not they are views "
                "of buckets.",
                rests_on="zero/without-gradients",
            ),
            thawed,
        ),
        (
            chapter.must(
                "zero/few-parameters",
                "Ranks without a parameter of their own take part in steps and consolidation.",
                rests_on="zero/trains-alike",
            ),
            few_parameters,
        ),
        (
            chapter.must(
                "zero/closure",
                "step returns what its closure returns.",
                rests_on="zero/trains-alike",
            ),
            closure,
        ),
        (
            chapter.must(
                "zero/zero-grad",
                "zero_grad clears the gradients of all parameters, not only of this rank's share.",
            ),
            zeroed,
        ),
        (
            chapter.must(
                "zero/same-objects",
                "param_groups hold the parameters that were given, in their order, and these keep "
                "their values also as views of buckets.",
            ),
            same_objects,
        ),
        (
            chapter.must(
                "zero/options",
                "param_groups show the options of each group, defaults of the optimizer included.",
            ),
            options_of_groups,
        ),
        (
            chapter.must(
                "zero/subgroup",
                "In a group whose ranks are numbered otherwise than in the world, training and "
                "consolidation are those of the optimizer itself.",
                rests_on=("zero/trains-alike", "zero/consolidated-groups"),
            ),
            subgroup,
        ),
        (
            chapter.must(
                "zero/consolidated",
                "After consolidate_state_dict(to), state_dict of that rank is the one of the "
                "optimizer that is sharded: its states, its options and their order.",
                rests_on="zero/trains-alike",
            ),
            consolidated_state,
        ),
        (
            chapter.must(
                "zero/consolidated-groups",
                "A state that is consolidated has several groups of parameters, in any order, as "
                "the optimizer that is sharded has them.",
                rests_on=("zero/groups", "zero/consolidated"),
            ),
            consolidated_groups,
        ),
        (
            chapter.must(
                "zero/consolidated-after-changes",
                "A state that is consolidated is right after a parameter was frozen, a group was "
                "added and an option changed.",
                rests_on=("zero/added-group", "zero/consolidated-groups"),
            ),
            consolidated_after_change,
        ),
        (
            chapter.must(
                "zero/not-consolidated",
                "Where no state was consolidated, state_dict raises RuntimeError that names the "
                "rank to consolidate it to.",
            ),
            not_consolidated,
        ),
        (
            chapter.should(
                "zero/no-such-rank",
                "consolidate_state_dict to a rank that the group does not have is refused.",
            ),
            no_such_rank,
        ),
        (
            chapter.must(
                "zero/load",
                "load_state_dict takes the state of the optimizer that is sharded, and training "
                "goes on as with that one.",
                rests_on="zero/trains-alike",
            ),
            loads,
        ),
        (
            chapter.must(
                "zero/load-groups",
                "load_state_dict takes a state with several groups of parameters, and training "
                "goes on.",
                rests_on=("zero/groups", "zero/load"),
            ),
            loads_groups,
        ),
        (
            chapter.must(
                "zero/load-consolidated",
                "A consolidated state that was loaded is the one that is consolidated again.",
                rests_on=("zero/consolidated-groups", "zero/load-groups"),
            ),
            loads_where_it_came_from,
        ),
        (
            chapter.should(
                "zero/load-leaves-its-argument",
                "load_state_dict leaves the state that it is given as it is.",
                source="torch 2.13 docs, Optimizer.load_state_dict, which leaves it",
                rests_on="zero/load",
            ),
            leaves_what_it_loads,
        ),
        (
            chapter.must(
                "zero/refused",
                "What is no iterable of parameters or groups is a TypeError; no parameters, a "
                "group without them, and parameters of several dtypes are a ValueError.",
            ),
            not_to_be_sharded,
        ),
    ),
)
def test_zero(ranks: Ranks, fact: Fact) -> None:
    check_fact(ranks, fact)

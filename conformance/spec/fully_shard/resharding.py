"""When parameters are whole: in which form a module shows them, and when their memory is there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from conformance import Chapter, Me, Ranks, assert_that, world_sizes
from conformance.spec.facts import Fact, check_fact, rows, unlike
from conformance.spec.fsdp.models import Net
from conformance.spec.fully_shard.recipes import Recipe, everywhere, sharded
from conformance.spec.fully_shard.recording import logged

NEEDS = ("op:all_gather_into_tensor", "op:reduce_scatter_tensor", "dtype:float64", "reduce_op:sum")
AFTER_FORWARD = "torch 2.13 docs, fully_shard, reshard_after_forward"

chapter = Chapter("fully_shard", source=AFTER_FORWARD, needs=NEEDS)

NET = Net(blocks=3)


@dataclass
class Watch:
    """Which blocks show whole parameters, at each forward, after the forward, when each block's
    backward ends, and at the end; and whether the root does, after forward and backward.

    memory: which blocks' whole parameters have memory, at the same moments.
    """

    shown: dict[str, list[Any]] = field(default_factory=dict)
    memory: dict[str, list[Any]] = field(default_factory=dict)


class Watcher:
    """Looks at a model's blocks, by hooks of the blocks."""

    def __init__(self, model: Any) -> None:
        self.model, self.watch = model, Watch()
        self._whole: dict[int, torch.Tensor] = {}
        for index, block in enumerate(model.blocks):
            block.up.register_forward_pre_hook(lambda layer, _, i=index: self._keep(i, layer))
            block.up.register_full_backward_hook(lambda *_: self.look("backward"))

    def _keep(self, index: int, layer: Any) -> None:
        self._whole[index] = layer.weight
        self.look("forward")

    def look(self, moment: str) -> None:
        weights = [block.up.weight for block in self.model.blocks]
        shown = [i for i, weight in enumerate(weights) if not isinstance(weight, DTensor)]
        kept = {i: w for i, w in self._whole.items() if not isinstance(w, DTensor)}
        alive = [i for i, weight in kept.items() if weight.untyped_storage().nbytes()]
        self.watch.shown.setdefault(moment, []).append(shown)
        self.watch.memory.setdefault(moment, []).append(alive)

    def root_is_whole(self) -> bool:
        return not isinstance(self.model.head.weight, DTensor)


def watched(
    me: Me, recipe: Recipe, trains: bool = True, steps: int = 1
) -> tuple[Watch, list[bool]]:
    model = sharded(me, recipe)
    watcher = Watcher(model)
    root = []
    for step in range(steps):
        watcher.watch = Watch()
        with torch.set_grad_enabled(trains):
            loss = NET.loss(model, me.rank, step, me.device)
        watcher.look("between")
        root = [watcher.root_is_whole()]
        if trains:
            loss.backward()
        watcher.look("end")
        root.append(watcher.root_is_whole())
    return watcher.watch, root


@dataclass(frozen=True, slots=True)
class Case:
    """What is to be seen in the last step: of blocks by moment, or of the root after forward and
    backward.

    of: "shown" or "memory".
    """

    of: str = "shown"
    want: Mapping[str, Any] = field(default_factory=dict)
    root: tuple[bool, bool] | None = None
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    calls: tuple[tuple[str, tuple[Any, ...]], ...] = ()
    trains: bool = True
    steps: int = 1


KEPT = {"reshard_after_forward": False}
MOMENTS = rows(
    (
        chapter.must(
            "fully_shard/whole-in-forward",
            "In a unit's forward its modules show whole parameters, and other units do not.",
        ),
        Case(want={"forward": [[0], [1], [2]]}),
    ),
    (
        chapter.must(
            "fully_shard/sharded-after-forward",
            "After its forward a unit below the root shows its shards again.",
        ),
        Case(want={"between": [[]]}),
    ),
    (
        chapter.must(
            "fully_shard/root-kept",
            "By default the root keeps its whole parameters from the forward to the backward.",
        ),
        Case(root=(True, False)),
    ),
    (
        chapter.must(
            "fully_shard/root-freed",
            "With reshard_after_forward=True the root too shows its shards after the forward.",
        ),
        Case(root=(False, False), kwargs={"reshard_after_forward": True}),
    ),
    (
        chapter.must(
            "fully_shard/kept-after-forward",
            "With reshard_after_forward=False whole parameters stay until the unit's backward.",
        ),
        Case(want={"between": [[0, 1, 2]]}, kwargs=KEPT),
    ),
    (
        chapter.must(
            "fully_shard/sharded-after-backward",
            "After a backward all units show their shards.",
        ),
        Case(want={"end": [[]]}, root=(True, False), kwargs=KEPT),
    ),
    (
        chapter.must(
            "fully_shard/freed-after-forward",
            "What was whole has no memory after the unit's forward, also if a reference to it is "
            "kept.",
            source="torch 2.13, FSDPParam.free_unsharded_param",
        ),
        Case("memory", {"forward": [[0], [1], [2]], "between": [[]]}),
    ),
    (
        chapter.must(
            "fully_shard/one-unit-at-once",
            "In a backward, of the units below the root the one whose gradients are computed is "
            "whole, and no other one's whole parameters have memory.",
            source="observed, torch 2.13.0: what is gathered ahead is copied out when it is needed",
        ),
        Case("memory", {"backward": [[2], [1], [0]]}, steps=2),
    ),
    (
        chapter.must(
            "fully_shard/freed-after-backward",
            "After a backward no whole parameter has memory.",
            source="torch 2.13, FSDPParam.free_unsharded_param",
        ),
        Case("memory", {"end": [[]]}, kwargs=KEPT),
    ),
    (
        chapter.must(
            "fully_shard/sharded-in-evaluation",
            "A forward without gradients leaves units below the root sharded.",
        ),
        Case(want={"forward": [[0], [1], [2]], "end": [[]]}, trains=False),
    ),
    (
        chapter.must(
            "fully_shard/changed-after-forward",
            "set_reshard_after_forward changes what reshard_after_forward has said.",
            source="torch 2.13 docs, FSDPModule, set_reshard_after_forward",
        ),
        Case(
            want={"between": [[]]},
            root=(False, False),
            kwargs=KEPT,
            calls=(("set_reshard_after_forward", (True,)),),
        ),
    ),
    (
        chapter.must(
            "fully_shard/kept-after-backward",
            "After set_reshard_after_backward(False), a backward leaves parameters whole.",
            source="torch 2.13 docs, FSDPModule, set_reshard_after_backward",
        ),
        Case(
            want={"end": [[0, 1, 2]]},
            root=(True, True),
            calls=(("set_reshard_after_backward", (False,)),),
        ),
    ),
)


@world_sizes(2)
@pytest.mark.parametrize("case", MOMENTS)
def test_when_parameters_are_whole(ranks: Ranks, case: Case) -> None:
    recipe = Recipe(net=NET, kwargs=case.kwargs, calls=case.calls)
    for rank, (watch, root) in enumerate(ranks.run(watched, recipe, case.trains, case.steps)):
        seen = getattr(watch, case.of)
        for moment, want in case.want.items():
            got = [sorted(blocks) for blocks in seen.get(moment, [])]
            assert_that(got == want, f"{moment}: whole are {got}, want {want}", rank)
        if case.root is not None:
            whole = tuple(root)
            assert_that(whole == case.root, f"the root is whole: {whole}, want {case.root}", rank)


def divided_among_two(me: Me, net: Net = NET, **kwargs: Any) -> list[str]:
    model = sharded(me, Recipe(net=net, kwargs={"reshard_after_forward": 2, **kwargs}))
    whole = net.make()
    net.loss(model, me.rank, 0, me.device)
    weight: Any = model.blocks[0].up.weight
    if not isinstance(weight, DTensor):
        return ["after the forward the weight is no DTensor"]
    weight_before = whole.get_parameter("blocks.0.up.weight").detach()
    want = weight_before.chunk(2)[me.rank % 2]
    found = unlike("after the forward", weight.to_local().detach().cpu(), want)
    return found + unlike("global shape", tuple(weight.shape), tuple(weight_before.shape))


def five_rows_among_two(me: Me) -> list[str]:
    """Four ranks pad five rows to eight, or none along columns; two pad them to six."""
    by_rows = divided_among_two(me, Net(hidden=5))
    return by_rows + divided_among_two(me, Net(width=8, hidden=5), shard_placement_fn=by_columns)


def by_columns(param: nn.Parameter) -> Shard | None:
    return Shard(1) if param.ndim == 2 and param.size(1) % 4 == 0 else None


def reshards_in_smaller_groups(me: Me) -> list[str]:
    model, log = logged(me, Recipe(net=NET, units="blocks", kwargs={"reshard_after_forward": 2}))
    loss = NET.loss(model, me.rank, 0, me.device)
    forward = len(log.take())
    loss.backward()
    gathers = [line for line in log.take() if line.startswith("gather")]
    found = unlike("gathers of all ranks in the forward", forward, 4)
    return found + unlike("gathers of all ranks in the backward", gathers, [])


SMALLER = rows(
    (
        chapter.must(
            "fully_shard/smaller-shards",
            "With an int as reshard_after_forward, modules show DTensors that are divided among "
            "that many neighbours between forward and backward.",
        ),
        divided_among_two,
    ),
    (
        chapter.must(
            "fully_shard/smaller-uneven-shards",
            "Between forward and backward, the DTensors of an int as reshard_after_forward hold "
            "all rows of the parameter and no padding, also if all ranks together pad them "
            "otherwise, or divide the parameter along its columns.",
        ),
        five_rows_among_two,
    ),
    (
        chapter.must(
            "fully_shard/smaller-gathers",
            "With an int as reshard_after_forward, the backward gathers in the smaller groups.",
        ),
        reshards_in_smaller_groups,
    ),
)


@world_sizes(4)
@pytest.mark.parametrize("fact", SMALLER)
def test_smaller_groups(ranks: Ranks, fact: Fact) -> None:
    check_fact(ranks, fact)


def next_gathers(me: Me) -> list[str]:
    """The second step of a model that keeps its parameters whole after the backward."""
    model, log = logged(me, Recipe(net=NET, calls=(("set_reshard_after_backward", (False,)),)))
    for step in range(2):
        log.take()
        NET.loss(model, me.rank, step, me.device).backward()
    everywhere(model, "reshard")
    gathers = [line for line in log.take() if line.startswith("gather")]
    return unlike("gathers of the second step", len(gathers), 3)


@chapter.must(
    "fully_shard/no-gather-when-kept",
    "What a backward has left whole is not gathered in the next forward.",
    source="torch 2.13 docs, FSDPModule, set_reshard_after_backward",
)
@world_sizes(2)
def test_the_next_forward(ranks: Ranks) -> None:
    check_fact(ranks, next_gathers)

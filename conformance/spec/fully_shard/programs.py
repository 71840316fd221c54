"""Random programs of training under fully_shard: what its features do together, in any order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from conformance import Chapter, Me, Ranks, world_sizes
from conformance.spec.fsdp.models import Net
from conformance.spec.fully_shard.recipes import (
    CPU,
    Recipe,
    check_shards,
    everywhere,
    local,
    sharded,
    shards_of,
)

NEEDS = ("op:all_gather_into_tensor", "op:reduce_scatter_tensor", "dtype:float64", "reduce_op:sum")

chapter = Chapter("fully_shard", source="derived from torch 2.13 docs, fully_shard", needs=NEEDS)


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """Backwards whose gradients add up, the last one synchronized, and an optimizer's step.

    backwards: of each, whether it is synchronized.
    before: "evaluate" (a forward without gradients), "drop" (one whose output is not used),
        "unshard" and "reshard" (of all modules), "save" and "load" (the state dict that was saved
        last, at first the initial one).
    frozen: whether the last block is frozen in this step.
    """

    backwards: tuple[bool, ...] = (True,)
    before: tuple[str, ...] = ()
    frozen: bool = False


@dataclass(frozen=True, slots=True)
class Program:
    """A model, how it is sharded, and what is done with it."""

    recipe: Recipe
    steps: tuple[OptimizerStep, ...]


class Life:
    """A model, sharded or not, that a program is carried out on.

    ranks: whose batches it is given.
    """

    def __init__(self, program: Program, model: Any, ranks: Sequence[int], device: Any) -> None:
        self.net, self.model, self.ranks, self.device = program.recipe.net, model, ranks, device
        self.optimizer = program.recipe.optimizer_of(model)
        self.is_sharded = len(ranks) == 1
        self.saved = self._state()

    def _state(self) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in self.model.state_dict().items()}

    def loss(self, number: int) -> Tensor:
        losses = [self.net.loss(self.model, rank, number, self.device) for rank in self.ranks]
        return torch.stack(losses).mean()

    def do(self, word: str) -> None:
        if word == "evaluate":
            with torch.no_grad():
                self.loss(90)
        elif word == "drop":
            self.loss(91)
        elif word == "save":
            self.saved = self._state()
        elif word == "load":
            self.model.load_state_dict(self.saved)
        elif self.is_sharded:  # "unshard" and "reshard"
            everywhere(self.model, word)

    def step(self, index: int, step: OptimizerStep) -> None:
        for word in step.before:
            self.do(word)
        if self.is_sharded:
            everywhere(self.model, "reshard")
        self.model.blocks[-1].requires_grad_(not step.frozen)
        for number, syncs in enumerate(step.backwards):
            if self.is_sharded:
                self.model.set_requires_gradient_sync(syncs)
            self.loss(10 * index + number).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def run_program(me: Me, program: Program) -> list[dict[str, Tensor]]:
    """Shards after each step."""
    life = Life(program, sharded(me, program.recipe), [me.rank], me.device)
    seen = []
    for index, step in enumerate(program.steps):
        life.step(index, step)
        seen.append(shards_of(life.model))
    return seen


def run_whole(program: Program, world_size: int) -> list[dict[str, Tensor]]:
    """Parameters of the bare module after each step."""
    life = Life(program, program.recipe.net.make(), range(world_size), CPU)
    if world_size == 1:
        life.is_sharded = False
    seen = []
    for index, step in enumerate(program.steps):
        life.step(index, step)
        seen.append({name: local(p) for name, p in life.model.named_parameters()})
    return seen


WORDS = ("evaluate", "drop", "unshard", "reshard", "save", "load")
STEPS = st.builds(
    OptimizerStep,
    backwards=st.lists(st.booleans(), max_size=2).map(lambda syncs: (*syncs, True)),
    before=st.lists(st.sampled_from(WORDS), max_size=3).map(tuple),
    frozen=st.booleans(),
)


@st.composite
def programs(draw: st.DrawFn) -> Program:
    net = Net(
        width=draw(st.integers(1, 5)),
        hidden=draw(st.integers(1, 6)),
        blocks=draw(st.integers(1, 3)),
        vocabulary=draw(st.integers(2, 8)),
        tied=draw(st.booleans()),
        nested=draw(st.booleans()),
    )
    after_forward = draw(st.sampled_from([None, True, False]))
    # A parameter cannot be in two units.
    units = draw(st.sampled_from(["root", "blocks", "list", *([] if net.tied else ["layers"])]))
    kwargs = {} if after_forward is None else {"reshard_after_forward": after_forward}
    return Program(
        Recipe(net=net, units=units, kwargs=kwargs),
        draw(st.lists(STEPS, min_size=1, max_size=3).map(tuple)),
    )


@chapter.must(
    "fully_shard/any-program",
    "Whatever the model, its units and what is done between and within steps (evaluation, dropped "
    "forwards, unshard, reshard, state dicts, frozen blocks, accumulation), training is the bare "
    "module's.",
    rests_on="fully_shard/training",
)
@world_sizes(2, 3)
@given(program=programs())
@settings(max_examples=15)
def test_any_program(ranks: Ranks, program: Program) -> None:
    got = ranks.run(run_program, program)
    for index, want in enumerate(run_whole(program, ranks.world_size)):
        mine = [steps[index] for steps in got]
        check_shards(mine, want, program.recipe, f"step {index + 1}: params")

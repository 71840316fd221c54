"""Random programs of training under FSDP: what its features do together, in any order."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from conformance import Chapter, Me, Ranks, world_sizes
from conformance.oracle.near import Near
from conformance.spec.fsdp.models import Net
from conformance.spec.fsdp.training_runs import (
    CPU,
    STRATEGIES,
    Recipe,
    check_tensors,
    full_parameters,
)
from conformance.spec.tolerance import assert_near

chapter = Chapter("fsdp", source="derived from torch 2.13 docs, FullyShardedDataParallel")

LIMIT = 0.2  # of the norm, which is larger at the beginning


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """Backward passes whose gradients add up, the last one synchronized, and an optimizer's step.

    passes: of each backward, whether it is synchronized.
    forwards: forward passes before each backward.
    before: "evaluate" (a forward without gradients), "drop" (one whose output is not used), "save"
        and "load" (the state dict that was saved last, at first the initial one), "halve" (all
        parameters, while they are summoned).
    frozen: numbers of the blocks that are frozen in this step.
    clips: whether gradients are clipped, to a norm of `LIMIT`.
    zero: how gradients are cleared before: "none", "zeros", or "keep", for not at all.
    """

    passes: tuple[bool, ...] = (True,)
    forwards: int = 1
    before: tuple[str, ...] = ()
    frozen: tuple[int, ...] = ()
    clips: bool = False
    zero: str = "none"


@dataclass(frozen=True, slots=True)
class Program:
    """A model, how it is wrapped, and what is done with it."""

    recipe: Recipe
    steps: tuple[OptimizerStep, ...]

    @property
    def within(self) -> float:
        """How far off results may be, as a share of the largest element."""
        return 1e-9 if self.recipe.net.dtype == "float64" else 1e-4


@dataclass(frozen=True, slots=True)
class Step:
    """Losses of a step's forwards, the norm of its gradients if it clips, parameters after it."""

    losses: list[Tensor]
    norm: list[Tensor]
    params: dict[str, Tensor]


class Life:
    """A model, wrapped or not, that a program is carried out on.

    network: what was wrapped; the model itself, if it was not.
    loss: of the model, for the batch of a number.
    in_full: a context in which the model has all parameters in full.
    """

    def __init__(
        self,
        recipe: Recipe,
        model: Any,
        network: Any,
        loss: Callable[[int], Tensor],
        in_full: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    ) -> None:
        self.model = model
        self.network = network
        self.loss = loss
        self.in_full = in_full
        self.optimizer = recipe.optimizer_of(model)
        self._saved = copy.deepcopy(model.state_dict())

    def prepare(self, step: OptimizerStep, number: int) -> None:
        """What a step begins with; `number` is that of the batch of its further forwards."""
        # while parameters are sharded: a forward without a backward may leave them otherwise
        for i, block in enumerate(self.network.blocks):
            block.requires_grad_(i not in step.frozen)
        for what in step.before:
            if what == "evaluate":
                with torch.no_grad():
                    self.loss(number)
            elif what == "drop":
                self.loss(number)
            elif what == "save":
                self._saved = copy.deepcopy(self.model.state_dict())
            elif what == "load":
                self.model.load_state_dict(self._saved)
            else:
                self.halve()
        if step.zero != "keep":
            self.optimizer.zero_grad(set_to_none=step.zero == "none")

    def halve(self) -> None:
        """Every rank does the same, so it does not matter whose chunk is kept."""
        with self.in_full(), torch.no_grad():
            for param in self.model.parameters():
                param.mul_(0.5)


def run_program(me: Me, program: Program) -> list[Step]:
    """What this rank's model is like after each step."""

    def loss(number: int) -> Tensor:
        return net.loss(model, me.rank, number, me.device)

    net = program.recipe.net
    network = net.make()
    model = program.recipe.around(me, network)
    summoned = partial(type(model).summon_full_params, model)
    life = Life(program.recipe, model, network, loss, summoned)
    done = []
    for number, step in enumerate(program.steps):
        life.prepare(step, 100 * number)
        losses = []
        for k, synchronized in enumerate(step.passes):
            with contextlib.nullcontext() if synchronized else model.no_sync():
                ours = [loss(100 * number + 10 * k + i) for i in range(step.forwards)]
                torch.stack(ours).sum().backward()
            losses += [one.detach() for one in ours]
        norm = [model.clip_grad_norm_(LIMIT)] if step.clips else []
        life.optimizer.step()
        done.append(Step(losses, norm, full_parameters(model)))
    return done


def run_whole(program: Program, world_size: int) -> list[list[Step]]:
    """What the bare module makes of it, with the mean of all ranks' losses: [rank][step]."""
    net = program.recipe.net
    model = net.make()
    life = Life(program.recipe, model, model, lambda number: net.loss(model, 0, number, CPU))
    done: list[list[Step]] = [[] for _ in range(world_size)]
    for number, step in enumerate(program.steps):
        life.prepare(step, 100 * number)
        losses: list[list[Tensor]] = [[] for _ in range(world_size)]
        for k in range(len(step.passes)):
            for rank, mine in enumerate(losses):
                numbers = [100 * number + 10 * k + i for i in range(step.forwards)]
                ours = [net.loss(model, rank, i, CPU) for i in numbers]
                (torch.stack(ours).sum() / world_size).backward()
                mine += [one.detach() for one in ours]
        clip = nn.utils.clip_grad_norm_
        norm = [clip(model.parameters(), LIMIT)] if step.clips else []
        life.optimizer.step()
        params = {name: param.detach().clone() for name, param in model.named_parameters()}
        for steps, mine in zip(done, losses, strict=True):
            steps.append(Step(mine, norm, params))
    return done


def check_steps(
    got: Sequence[Sequence[Step]], want: Sequence[Sequence[Step]], within: float
) -> None:
    """Step by step, in the order in which a mistake shows: losses, norm, parameters."""
    for number in range(len(want[0])):
        mine = [steps[number] for steps in got]
        wanted = [steps[number] for steps in want]
        for i in range(len(wanted[0].losses)):
            losses = [step.losses[i] for step in wanted]
            near = [Near(x.double(), within * x.abs().clamp(min=1), x.dtype) for x in losses]
            assert_near([step.losses[i] for step in mine], near, f"step {number + 1}, loss {i + 1}")
        if wanted[0].norm:
            near = [Near.relative(step.norm[0], within) for step in wanted]
            assert_near([step.norm[0] for step in mine], near, f"step {number + 1}, norm")
        check_tensors([step.params for step in mine], [step.params for step in wanted], within)


@st.composite
def programs(draw: st.DrawFn) -> Program:
    clips = draw(st.booleans())
    recipe = Recipe(
        Net(dtype="float32" if clips else "float64"),  # fsdp/norm-of-doubles is about others
        strategy=draw(st.sampled_from(STRATEGIES)),
        orig=draw(st.booleans()),
        wrap=draw(st.sampled_from(["root", "blocks"])),
    )
    steps = draw(st.lists(optimizer_steps(recipe, clips), min_size=2, max_size=4))
    return Program(recipe, tuple(steps))


@st.composite
def optimizer_steps(draw: st.DrawFn, recipe: Recipe, clips: bool) -> OptimizerStep:
    # a flat parameter is frozen or not from the beginning
    blocks = st.sampled_from(range(recipe.net.blocks))
    frozen = draw(st.sets(blocks)) if recipe.orig else set()
    # no document says whether a frozen parameter still shows its gradient
    zero = "none" if frozen else draw(st.sampled_from(["none", "zeros", "keep"]))
    actions = ["evaluate", "save", "load", "halve"]
    if not frozen:  # fsdp/dropped-forward-of-a-frozen-unit is about others
        actions.append("drop")
    # fsdp/no-sync-after-thawing is about no_sync with NO_SHARD and parameters that were frozen
    may_keep = not (recipe.orig and recipe.strategy == "NO_SHARD")
    synchronized = st.booleans() if may_keep else st.just(True)
    return OptimizerStep(
        passes=(*draw(st.lists(synchronized, max_size=2)), True),
        forwards=draw(st.integers(1, 2)),
        before=tuple(draw(st.lists(st.sampled_from(actions), max_size=3))),
        frozen=tuple(sorted(frozen)),
        clips=clips,  # in every step of float32, or rounding grows with the parameters
        zero=zero,
    )


@chapter.must(
    "fsdp/any-order",
    "Whatever training does from step to step, in whatever order (freezes and thaws original "
    "parameters, accumulates with and without no_sync, clips, clears gradients or keeps them, "
    "evaluates, drops outputs, saves, loads, changes summoned parameters), losses, norms and "
    "parameters are those of the bare module.",
    rests_on=(
        "fsdp/any-model",
        "fsdp/dropped-forward",
        "fsdp/eval",
        "fsdp/freezing-and-thawing",
        "fsdp/full-state-dict",
        "fsdp/loads-the-bare-state-dict",
        "fsdp/no-shard",
        "fsdp/no-sync",
        "fsdp/no-sync-original-parameters",
        "fsdp/norm-clips",
        "fsdp/original-parameters",
        "fsdp/shard-grad-op",
        "fsdp/summon-writes-back",
    ),
)
@world_sizes(2, 3)
@given(program=programs())
@settings(max_examples=20)
def test_a_program_trains_as_the_bare_module_does(ranks: Ranks, program: Program) -> None:
    got = ranks.run(run_program, program)
    check_steps(got, run_whole(program, ranks.world_size), program.within)

"""Random programs of training under DDP: what its features do together, in any order."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from conformance import Chapter, Me, Ranks, world_sizes
from conformance.oracle.training import Step, optimizer_for, snapshot
from conformance.spec.ddp.models import WIDTH, Branching, Recipe, loss_of, normal
from conformance.spec.ddp.training_runs import Options, assert_trained

chapter = Chapter("ddp", source="derived from torch 2.13 docs, DistributedDataParallel")

BYTE = 2**-20
RECIPE = Recipe(Branching, (4,))
EVERY = (0, 1, 2, 3)
KINDS: Mapping[str, Options] = {
    "plain": {},
    "static": {"static_graph": True},
    "search": {"find_unused_parameters": True},
}

Uses = tuple[int, ...]  # branches, in the order of their use


@dataclass(frozen=True, slots=True)
class Pass:
    """A forward and a backward pass. uses: by rank."""

    synchronised: bool
    uses: tuple[Uses, ...]


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """Passes whose gradients add up, the last one synchronised, and a step of the optimizer.

    before: "evaluate" (a forward pass without gradients), "drop" (one whose output is not used),
        "save" and "load" (the state dict that was saved last, at first the initial one).
    frozen: branches.
    zero: how gradients are cleared before: "none", "zeros", or "keep", for not at all.
    """

    passes: tuple[Pass, ...]
    before: tuple[str, ...] = ()
    frozen: Uses = ()
    zero: str = "none"


@dataclass(frozen=True, slots=True)
class Program:
    """kind: of `KINDS`."""

    kind: str
    view: bool
    cap: int
    steps: tuple[OptimizerStep, ...]

    @property
    def options(self) -> Options:
        return {
            **KINDS[self.kind],
            "gradient_as_bucket_view": self.view,
            "bucket_cap_mb": self.cap * BYTE,
        }


def batch(step: int, number: int, rank: int) -> Tensor:
    return normal((2, WIDTH), 1000 * step + 10 * number + rank + 1)


class Life:
    """A module that carries out what a program does beside passes, and what it was like."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.optimizer = optimizer_for(module)
        self.done: list[Step] = []
        self._saved = copy.deepcopy(module.state_dict())

    def prepare(self, step: OptimizerStep, model: nn.Module, x: Tensor) -> None:
        """model: the wrapper, or the module itself."""
        for what in step.before:
            if what == "evaluate":
                with torch.no_grad():
                    model(x, EVERY)
            elif what == "drop":
                model(x, EVERY)
            elif what == "save":
                self._saved = copy.deepcopy(self.module.state_dict())
            else:
                self.module.load_state_dict(self._saved)
        for i in EVERY:
            branch = self.module.get_submodule(f"branches.{i}")
            branch.requires_grad_(i not in step.frozen)
        if step.zero != "keep":
            model.zero_grad(set_to_none=step.zero == "none")

    def finish(self) -> None:
        self.optimizer.step()
        self.done.append(snapshot(self.module))


def run_program(me: Me, program: Program) -> list[Step]:
    """This rank's part; what its model is like after each step."""
    module = RECIPE(seed=me.rank).to(me.device)
    model = me.ddp(module, **program.options)
    life = Life(module)
    for number, step in enumerate(program.steps):
        life.prepare(step, model, batch(number, 0, me.rank).to(me.device))
        for k, each in enumerate(step.passes):
            x = batch(number, k, me.rank).to(me.device)
            with contextlib.nullcontext() if each.synchronised else model.no_sync():
                loss_of(model(x, each.uses[me.rank])).backward()
        life.finish()
    return life.done


def run_alone(program: Program, world_size: int) -> list[Step]:
    """What one process makes of it that computes every rank's gradients, one after the other."""
    life = Life(RECIPE())
    named = dict(life.module.named_parameters())
    grads: list[dict[str, Tensor | None]] = [dict.fromkeys(named) for _ in range(world_size)]
    used: set[str] = set()  # on any rank, since the last synchronised pass
    for number, step in enumerate(program.steps):
        life.prepare(step, life.module, batch(number, 0, 0))
        if step.zero != "keep":
            cleared = None if step.zero == "none" else 0.0
            grads = [{n: _cleared(g, cleared) for n, g in mine.items()} for mine in grads]
        for k, each in enumerate(step.passes):
            for rank, mine in enumerate(grads):
                life.module.zero_grad()
                loss_of(life.module(batch(number, k, rank), each.uses[rank])).backward()
                for name, param in named.items():
                    if param.grad is not None:
                        used.add(name)
                        before = mine[name]
                        mine[name] = param.grad if before is None else before + param.grad
            if each.synchronised:
                for name in used:
                    parts = [mine[name] for mine in grads if mine[name] is not None]
                    mean = torch.stack([p for p in parts if p is not None]).sum(0) / world_size
                    for mine in grads:
                        mine[name] = mean
                used.clear()
        for name, param in named.items():
            param.grad = grads[0][name]
        life.finish()
    return life.done


def _cleared(grad: Tensor | None, to: float | None) -> Tensor | None:
    return None if grad is None or to is None else torch.full_like(grad, to)


@st.composite
def programs(draw: st.DrawFn, world_size: int) -> Program:
    kind = draw(st.sampled_from(sorted(KINDS)))
    first, *others = draw(st.lists(optimizer_steps(kind, world_size), min_size=2, max_size=5))
    if kind == "static":  # whether it may begin in no_sync is the business of another rule
        first = replace(first, passes=first.passes[-1:])
    return Program(kind, draw(st.booleans()), draw(st.integers(1, 400)), (first, *others))


@st.composite
def optimizer_steps(draw: st.DrawFn, kind: str, world_size: int) -> OptimizerStep:
    may_differ = kind == "search"
    frozen = draw(st.sets(st.sampled_from(EVERY), max_size=2)) if may_differ else set()
    trained = [i for i in EVERY if i not in frozen]
    uses: st.SearchStrategy[Uses] = st.just(EVERY)
    if may_differ:
        uses = st.lists(st.sampled_from(trained), min_size=1, unique=True).map(tuple)
    synchronised = [*draw(st.lists(st.booleans(), max_size=2)), True]
    passes = [Pass(s, tuple(draw(uses) for _ in range(world_size))) for s in synchronised]
    actions = ["evaluate", "save", "load"]
    if kind != "static" and synchronised[0]:  # or the dropped forward decides about the next pass
        actions.append("drop")
    before = draw(st.lists(st.sampled_from(actions), max_size=2))
    zero = draw(st.sampled_from(["none", "zeros", "keep"]))
    return OptimizerStep(tuple(passes), tuple(before), tuple(sorted(frozen)), zero)


@chapter.must(
    "ddp/any-order",
    "Whatever a program of training does, in whatever order (freezes and thaws, accumulates with "
    "and without no_sync, leaves parameters unused, clears gradients or keeps them, evaluates, "
    "drops outputs, saves and loads), gradients and parameters are those of one process that has "
    "all of the data.",
    rests_on=(
        "ddp/whole-batch",
        "ddp/backward/without-zero-grad",
        "ddp/backward/zero-grad",
        "ddp/no-sync/bucket-views",
        "ddp/no-sync/every-parameter",
        "ddp/unused/another-graph-each-step",
        "ddp/unused/forward-without-backward",
        "ddp/unused/frozen-later",
        "ddp/unused/kept-from-step-to-step",
    ),
)
@world_sizes(2, 3)
@given(data=st.data())
@settings(max_examples=20)
def test_a_program_trains_as_one_process_does(ranks: Ranks, data: st.DataObject) -> None:
    program = data.draw(programs(ranks.world_size), label="program")
    assert_trained(ranks.run(run_program, program), run_alone(program, ranks.world_size))

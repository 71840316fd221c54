"""Schedules: gradients, losses and outputs of one process, in whatever order microbatches run."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from conformance import Chapter, Me, Ranks, covers, not_probed, world_sizes
from conformance.spec.facts import Fact, check_fact, near, refusal, rows, unlike
from conformance.spec.pipeline.facts import (
    EVERY,
    LOOPS,
    ONE_STAGE,
    VS,
    Pipeline,
    alike,
    batch,
    linear,
    plain,
    schedule_named,
)

DOCS = "torch 2.13 docs, torch.distributed.pipelining"
NEEDS = ("op:send", "dtype:uint8", "dtype:int32", "dtype:int64")

chapter = Chapter("pipeline", source=DOCS, needs=NEEDS)


def gradients(me: Me, name: str, microbatches: int) -> list[str]:
    return alike(me, [name], microbatches=microbatches, rows=2 * microbatches)


@world_sizes(2, 3)
@pytest.mark.parametrize(
    "name",
    rows(
        (
            chapter.must(
                "pipeline/gpipe",
                "After a step of ScheduleGPipe, each stage has the gradients of one process with "
                "the whole batch.",
            ),
            "GPipe",
        ),
        (
            chapter.must(
                "pipeline/1f1b",
                "After a step of Schedule1F1B, each stage has the gradients of one process.",
            ),
            "1F1B",
        ),
        (
            chapter.must(
                "pipeline/looped-bfs",
                "After a step of ScheduleLoopedBFS, whose ranks have several stages, each stage "
                "has the gradients of one process.",
            ),
            "LoopedBFS",
        ),
        (
            chapter.must(
                "pipeline/interleaved-1f1b",
                "After a step of ScheduleInterleaved1F1B, each stage has the gradients of one "
                "process.",
            ),
            "Interleaved1F1B",
        ),
        (
            chapter.must(
                "pipeline/interleaved-zero-bubble",
                "After a step of ScheduleInterleavedZeroBubble, which computes gradients of "
                "weights later, each stage has the gradients of one process.",
            ),
            "InterleavedZeroBubble",
        ),
        (
            chapter.must(
                "pipeline/zbv",
                "After a step of ScheduleZBVZeroBubble, in which the last rank's two stages "
                "follow each other, each stage has the gradients of one process.",
            ),
            "ZBVZeroBubble",
        ),
        (
            chapter.must(
                "pipeline/dual-pipe-v",
                "After a step of ScheduleDualPipeV, each stage has the gradients of one process.",
            ),
            "DualPipeV",
        ),
    ),
)
def test_gradients(ranks: Ranks, name: str) -> None:
    check_fact(ranks, gradients, name, 6)


def losses_in_order(me: Me) -> list[str]:
    found: list[str] = []
    for name in EVERY:
        line = Pipeline(me, name)
        losses: list[Any] = ["old"]
        line.step(losses=losses)
        halves = zip(batch().chunk(4), batch(seed=501).chunk(4), strict=True)
        want = [line.loss(line.forward(x), y.to(me.device)).item() for x, y in halves]
        got = [loss if isinstance(loss, str) else loss.item() for loss in losses]
        found += unlike(f"losses of {name}", got, want if line.last else ["old"])
    return found


def outputs(me: Me) -> list[str]:
    found: list[str] = []
    for name in EVERY:
        line = Pipeline(me, name)
        got = line.step()
        want = plain(line.forward()) if line.last else None
        found += unlike(f"output of {name}", plain(got), want)
    return found


def no_outputs(me: Me) -> list[str]:
    found: list[str] = []
    for name in EVERY:
        line = Pipeline(me, name)
        found += unlike(f"output of {name}", line.step(return_outputs=False), None)
        line.whole_step()
        found += line.differences()
    return found


def means(me: Me) -> list[str]:
    return alike(me, EVERY, loss=nn.functional.mse_loss, scale_grads=True)


def accumulated(me: Me) -> list[str]:
    found: list[str] = []
    for name in ("GPipe", "InterleavedZeroBubble"):
        line = Pipeline(me, name, loss=nn.functional.mse_loss, scale_grads=True)
        for seed in (1, 2):
            line.step(batch(seed=seed))
            line.whole_step(batch(seed=seed))
        found += line.differences()
    return found


def training(me: Me) -> list[str]:
    """Three steps of an optimizer."""
    found: list[str] = []
    for name in ("1F1B", "Interleaved1F1B", "ZBVZeroBubble"):
        line = Pipeline(me, name)
        models = [*(m.parameters() for m in line.modules)], [m.parameters() for m in line.whole]
        both = [
            torch.optim.SGD([p for m in model for p in m], 1e-4, momentum=0.5) for model in models
        ]
        for seed in range(3):
            for optimizer, step in zip(both, (line.step, line.whole_step), strict=True):
                optimizer.zero_grad()
                step(batch(seed=seed))
                optimizer.step()
        for param, mine, whole in line.params():
            found += near(param, mine, whole)
    return found


class Late(nn.Module):
    """A layer that takes its time, in both directions."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        self.layer = linear(stage)

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.005)
        y: Tensor = self.layer(x)
        if y.requires_grad:
            y.register_hook(lambda grad: time.sleep(0.005))
        return y


def late_on(slow: int, stage: int) -> Any:
    return Late(stage) if stage == slow else linear(stage)


def late(me: Me) -> list[str]:
    """The layers of each rank in turn are late."""
    found: list[str] = []
    size = me.world_size
    for slow in range(size):
        make = partial(late_on, slow)
        found += alike(me, EVERY, make, microbatches=2 * size, rows=4 * size)
    return found


def evaluated(me: Me) -> list[str]:
    """Before training and after it."""
    found: list[str] = []
    for name in (*ONE_STAGE, *LOOPS):
        line = Pipeline(me, name)
        for when in ("before", "after"):
            losses: list[Any] = []
            got = line.step(call="eval", losses=losses)
            want = plain(line.forward()) if line.last else None
            found += unlike(f"output {when} training of {name}", plain(got), want)
            found += unlike(f"losses {when}", len(losses), 4 if line.last else 0)
            if when == "before":
                found += line.differences()
                line.step()
                line.whole_step()
            found += line.differences()
    return found


def evaluated_v(me: Me) -> list[str]:
    found: list[str] = []
    for name in VS:
        line = Pipeline(me, name)
        got = plain(line.step(call="eval"))
        found += unlike(f"output of {name}", got, plain(line.forward()))
    return found


def evaluated_without_target(me: Me) -> list[str]:
    found: list[str] = []
    for name in (*ONE_STAGE, *LOOPS):
        line = Pipeline(me, name)
        got = plain(line.schedule.eval(batch().to(me.device)))
        found += unlike(f"output of {name}", got, plain(line.forward()))
    return found


def refused_in_eval(me: Me) -> list[str]:
    """Of losses that are no list, on each rank, before anything is sent. Then it trains."""
    found: list[str] = []
    for name in (*ONE_STAGE, *LOOPS):
        line = Pipeline(me, name)
        line.step(call="eval")  # which also takes metadata
        inputs = (batch().to(me.device),) if line.first else ()
        said = refusal(partial(line.schedule.eval, *inputs, losses=()), TypeError)
        found += [f"{name}: {said}"] if "losses" not in said else []
        line.step()
        line.whole_step()
        found += line.differences()
    return found


class OnceBroken:
    """A loss that raises in its third call: metadata are taken by the first one."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 3:
            raise ValueError("no loss")
        return (output - target).pow(2).sum()


def after_an_exception(me: Me) -> list[str]:
    found: list[str] = []
    for name in (*ONE_STAGE, *LOOPS):
        line = Pipeline(me, name, loss=OnceBroken())
        said = refusal(line.step, ValueError)
        found += [f"{name}: {said}"] if said != "no loss" else []
        for _, param, _ in line.params():
            param.grad = None
        try:
            line.step()
        except Exception as error:
            return [*found, f"the next step of {name}: {type(error).__name__}: {error}"]
        line.whole_step()
        found += line.differences()
    return found


class Noted(nn.Module):
    """A layer that tells when it runs, and when its backward does."""

    def __init__(self, stage: int, notes: list[str]) -> None:
        super().__init__()
        self.layer, self.notes = linear(stage), notes

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        self.notes.append("F")
        if y.requires_grad:
            y.register_hook(lambda grad: self.notes.append("B"))
        return y


def most_kept(me: Me, name: str) -> int:
    """How many microbatches a rank has forwarded, at most, of which the backward is not done."""
    notes: list[str] = []
    line = Pipeline(me, name, lambda i: Noted(i, notes), microbatches=8)
    line.step()  # which also takes metadata
    notes.clear()
    line.step()
    kept, most = 0, 0
    for note in notes:
        kept += 1 if note == "F" else -1
        most = max(most, kept)
    return most


def kept_by_1f1b(me: Me) -> list[str]:
    return unlike("microbatches kept", most_kept(me, "1F1B"), me.world_size - me.rank)


def kept_by_gpipe(me: Me) -> list[str]:
    return unlike("microbatches kept", most_kept(me, "GPipe"), 8)


def names(me: Me) -> list[str]:
    found = [f"{name}: none" for name in EVERY if schedule_named(name.lower()) is None]
    for name in EVERY:
        found += unlike(name, schedule_named(name.upper()), schedule_named(name))
    said = refusal(lambda: schedule_named("2F2B"), ValueError)
    return found + ([f"an unknown name: {said}"] if "2F2B" not in said or said[0] == "(" else [])


def refused(me: Me) -> list[str]:
    def stage(index: int, count: int) -> Any:
        from torch.distributed.pipelining import PipelineStage

        return PipelineStage(linear(0), index, count, me.device)

    def without_gradients() -> Any:
        with torch.no_grad():
            return Pipeline(me, "GPipe").step()

    wrong: list[tuple[str, Any, type[Exception]]] = [
        ("stage 2 of 2", lambda: stage(2, 2), ValueError),
        ("fewer stages than ranks", lambda: stage(0, 1), RuntimeError),
        ("1F1B of one microbatch", lambda: Pipeline(me, "1F1B", microbatches=1), ValueError),
        (
            "a V of one stage a rank",
            lambda: schedule_named("ZBVZeroBubble")([stage(me.rank, 2)], 2),
            ValueError,
        ),
        ("step under no_grad", without_gradients, RuntimeError),
    ]
    said = [(what, refusal(call, kind)) for what, call, kind in wrong]
    return [f"{what}: {text}" for what, text in said if text.startswith("(")]


@world_sizes(2)
@pytest.mark.parametrize(
    "fact",
    rows(
        (
            chapter.must(
                "pipeline/losses",
                "The losses of a step are those of its microbatches, in their order, in the list "
                "of the rank that has the last stage; what was in it before is gone.",
            ),
            losses_in_order,
        ),
        (
            chapter.must(
                "pipeline/outputs",
                "step returns the output of the whole batch where the last stage is, and None "
                "elsewhere.",
            ),
            outputs,
        ),
        (
            chapter.must(
                "pipeline/no-outputs",
                "With return_outputs=False no rank returns one, and gradients are the same.",
                rests_on="pipeline/gpipe",
            ),
            no_outputs,
        ),
        (
            chapter.must(
                "pipeline/means",
                "With scale_grads and a loss that is a mean, gradients are those of the mean of "
                "the batch.",
                rests_on="pipeline/gpipe",
            ),
            means,
        ),
        (
            chapter.must(
                "pipeline/accumulated",
                "Gradients of further steps are added to those that are there, also with "
                "scale_grads.",
                source="torch 2.13 docs, Tensor.backward: gradients accumulate",
                rests_on="pipeline/means",
            ),
            accumulated,
        ),
        (
            chapter.must(
                "pipeline/training",
                "After steps of an optimizer, parameters are those of one process.",
                rests_on="pipeline/1f1b",
            ),
            training,
        ),
        (
            chapter.must(
                "pipeline/late-ranks",
                "Gradients are the same whichever rank is late.",
                rests_on="pipeline/1f1b",
            ),
            late,
        ),
        (
            chapter.must(
                "pipeline/eval",
                "eval gives outputs and losses and leaves gradients alone, before training and "
                "after it.",
                rests_on="pipeline/outputs",
            ),
            evaluated,
        ),
        (
            chapter.must(
                "pipeline/refused-in-eval",
                "If eval refuses losses that are no list, the next step trains.",
                rests_on="pipeline/eval",
            ),
            refused_in_eval,
        ),
        (
            chapter.must(
                "pipeline/kept-by-1f1b",
                "1F1B keeps as many microbatches as there are stages from this one on, no more.",
                source="PipeDream-Flush, Narayanan et al. 2021, section 3",
            ),
            kept_by_1f1b,
        ),
        (
            chapter.must(
                "pipeline/kept-by-gpipe",
                "GPipe forwards all microbatches before the first backward.",
                source="GPipe, Huang et al. 2019, section 2",
            ),
            kept_by_gpipe,
        ),
    ),
)
def test_schedules(ranks: Ranks, fact: Fact) -> None:
    check_fact(ranks, fact)


@world_sizes(2)
@pytest.mark.parametrize(
    "fact",
    rows(
        (
            chapter.must(
                "pipeline/names",
                "get_schedule_class finds schedules by name in upper case or lower, and an unknown "
                "name is a ValueError that tells it.",
                source="torch 2.13, get_schedule_class",
            ),
            names,
        ),
        (
            chapter.must(
                "pipeline/refused",
                "A stage out of range, too few microbatches for 1F1B and a V without two stages a "
                "rank are a ValueError; fewer stages than ranks and a step under no_grad are a "
                "RuntimeError.",
                source="torch 2.13, torch.distributed.pipelining",
            ),
            refused,
        ),
    ),
)
@not_probed()
def test_schedules_that_do_not_run(ranks: Ranks, fact: Fact) -> None:
    check_fact(ranks, fact)


@world_sizes(1)
@pytest.mark.parametrize(
    "fact",
    rows(
        (
            chapter.must(
                "pipeline/eval-of-a-v",
                "eval gives outputs with the schedules in which two stages of a rank follow each "
                "other.",
            ),
            evaluated_v,
        ),
        (
            chapter.must(
                "pipeline/eval-without-target",
                "eval needs no target: without one it gives outputs.",
                source="torch 2.13, eval(*args, target=None)",
            ),
            evaluated_without_target,
        ),
        (
            chapter.must(
                "pipeline/after-an-exception",
                "After a step that raised, the next one gives its own gradients and losses.",
            ),
            after_an_exception,
        ),
    ),
)
@not_probed()
def test_schedules_of_one_rank(ranks: Ranks, fact: Fact) -> None:
    check_fact(ranks, fact)


@covers("pipeline/late-ranks")
@world_sizes(3)
def test_late_ranks_of_three(ranks: Ranks) -> None:
    check_fact(ranks, late)


def drawn(me: Me, name: str, pairs: int, rows_: int, loops: int) -> list[str]:
    stages = loops * me.world_size if name in LOOPS else None
    microbatches = 2 * pairs  # the interleaved schedules run them in rounds of the ranks
    line = Pipeline(me, name, microbatches=microbatches, stages=stages)
    x, y = batch(rows_ * microbatches), batch(rows_ * microbatches, 501)
    for _ in range(2):
        line.step(x, y)
        line.whole_step(x, y)
    return line.differences()


@chapter.must(
    "pipeline/any-schedule",
    "Any schedule of any numbers of stages, microbatches and rows gives the gradients of one "
    "process, step after step.",
    rests_on=(
        "pipeline/gpipe",
        "pipeline/1f1b",
        "pipeline/looped-bfs",
        "pipeline/interleaved-1f1b",
    ),
)
@world_sizes(2)
@settings(max_examples=12)
@given(
    name=st.sampled_from(EVERY),
    pairs=st.integers(2, 4),
    rows_=st.integers(1, 3),
    loops=st.integers(1, 3),
)
def test_any_schedule(ranks: Ranks, name: str, pairs: int, rows_: int, loops: int) -> None:
    check_fact(ranks, drawn, name, pairs, rows_, loops)

"""Stages: what goes between them and into them, what they share, and in which groups they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import microbatch
from torch.nn.parallel import DistributedDataParallel

from conformance import Chapter, Me, Ranks, deadline, not_probed, world_sizes
from conformance.spec.facts import Fact, check_fact, rows, unlike
from conformance.spec.pipeline.facts import (
    EVERY,
    FEATURES,
    ONE_STAGE,
    Pipeline,
    alike,
    batch,
    filled,
    linear,
    plain,
)

DOCS = "torch 2.13 docs, torch.distributed.pipelining"
NEEDS = ("op:send", "dtype:uint8", "dtype:int32", "dtype:int64")
SIZES = ("feature:mismatch_errors", *NEEDS)
REDUCED = ("op:all_reduce", "op:broadcast", "op:all_gather", "reduce_op:sum", *NEEDS)

chapter = Chapter("pipeline", source=DOCS, needs=NEEDS)


class Layer(nn.Module):
    """A linear layer, and what else a stage of a case has."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        self.layer = linear(stage)


class Several(Layer):
    """Hands on the sum so far, its input and whole numbers; the last stage gives one tensor."""

    def forward(self, x: Tensor, so_far: Any = 0, places: Any = None) -> Any:
        y = self.layer(x)
        if places is None:
            return y, x, torch.tensor([i % 2 for i in range(len(x))], device=x.device)
        return y + so_far * places[:, None]


def several_values(me: Me) -> list[str]:
    return alike(me, ONE_STAGE, Several)


class Named(Layer):
    def forward(self, x: Tensor, *, factor: Any = 1, more: Any = 0) -> Tensor:
        y: Tensor = self.layer(x) * factor + more
        return y


def keywords(me: Me) -> list[str]:
    """Each rank gives its stages a tensor, of which each microbatch has its rows, and a number."""
    found: list[str] = []
    named: dict[str, Any] = {"factor": 2, "more": batch(seed=7).to(me.device)}
    for name in EVERY:
        line = Pipeline(me, name, Named)
        line.step(**named)
        line.whole_step(**named)
        found += line.differences()
    return found


class Columns(nn.Module):
    """Features are in the first dimension, and the batch in the second."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        self.weight = filled(nn.Linear(FEATURES, FEATURES, bias=False), stage).weight

    def forward(self, x: Tensor, more: Tensor) -> Tensor:
        y: Tensor = self.weight @ x + more
        return y


def other_dimension(me: Me) -> list[str]:
    found: list[str] = []
    spec = microbatch.TensorChunkSpec(1)
    how: dict[str, Any] = {
        "args_chunk_spec": (spec,),
        "kwargs_chunk_spec": {"more": spec},
        "output_merge_spec": spec,
        "loss": weighted,
    }
    for name in ("GPipe", "Interleaved1F1B"):
        line = Pipeline(me, name, Columns, **how)
        x, y = batch().t().contiguous(), batch(seed=501)
        more = batch(seed=7).t().contiguous().to(me.device)
        got, whole = line.step(x, y, more=more), line.forward(x, more=more)
        found += unlike(f"output of {name}", plain(got), plain(whole) if line.last else None)
        line.whole_step(x, y, more=more)
        found += line.differences()
    return found


def weighted(output: Tensor, target: Tensor) -> Tensor:
    return (output.t() * target).sum()


def input_gradient(me: Me) -> list[str]:
    found: list[str] = []
    for name in EVERY:
        line = Pipeline(me, name)
        mine, whole = (batch().to(me.device).requires_grad_() for _ in range(2))
        line.step(mine)
        line.whole_step(whole)
        want = plain(whole.grad) if line.first else None
        found += unlike(f"gradient of the input of {name}", plain(mine.grad), want)
    return found


def static(me: Me) -> list[str]:
    given = torch.zeros(2, FEATURES, device=me.device, requires_grad=True)
    return alike(me, EVERY, static=given)


def frozen_first(stage: int) -> Any:
    return linear(stage).requires_grad_(stage > 0)


def frozen(me: Me) -> list[str]:
    return alike(me, (*ONE_STAGE, "LoopedBFS", "Interleaved1F1B"), frozen_first)


def frozen_zero_bubble(me: Me) -> list[str]:
    return alike(me, ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"), frozen_first)


class Twice(Layer):
    """Uses its layer twice, and adds what it was given, and a parameter."""

    def __init__(self, stage: int) -> None:
        super().__init__(stage)
        self.shift = nn.Parameter(torch.full((FEATURES,), 1.0 + stage))
        self.unused = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(torch.relu(self.layer(x))) + x + self.shift
        return y


def used_twice(me: Me) -> list[str]:
    return alike(me, EVERY, Twice, loss=lambda output, target: (output * target).sum())


def tied(me: Me) -> list[str]:
    """The first and the last stage of the first rank of a V share their weight."""
    found: list[str] = []
    for name in ("ZBVZeroBubble", "DualPipeV"):
        line = Pipeline(me, name, loss=nn.functional.mse_loss, scale_grads=True)
        line.whole[-1].weight = line.whole[0].weight
        if line.first:
            line.modules[1].weight = line.modules[0].weight
        line.step()
        line.whole_step()
        found += line.differences()
    return found


class Counting(Layer):
    """Counts what goes through it, as batch norm does."""

    def __init__(self, stage: int) -> None:
        super().__init__(stage)
        self.batches = nn.Buffer(torch.zeros(()))
        self.total = nn.Buffer(torch.zeros(FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        with torch.no_grad():
            self.batches.add_(1)
            self.total.add_(y.sum(0))
        return y


def statistics(me: Me) -> list[str]:
    found: list[str] = []
    for name in EVERY:
        line = Pipeline(me, name, Counting)
        line.step()
        for x in batch().chunk(4):
            line.forward(x)
        for i, module in zip(line.own, line.modules, strict=True):
            got, want = (
                [plain(buffer) for buffer in each.buffers()] for each in (module, line.whole[i])
            )
            found += unlike(f"buffers of stage {i} of {name}", got, want)
    return found


def total(output: Tensor, target: Tensor) -> Tensor:
    """A loss that takes outputs and targets of different sizes."""
    return output.sum() + target.sum()


def uneven(me: Me) -> list[str]:
    """Two microbatches of seven rows."""
    line = Pipeline(me, "GPipe", microbatches=2, loss=total)
    try:
        got = line.step(batch(7), batch(7), call="eval")
    except Exception:
        return []  # refused
    return unlike("output", plain(got), plain(line.forward(batch(7))) if line.last else None)


def other_size(me: Me) -> list[str]:
    """A second batch that is smaller."""
    line = Pipeline(me, "GPipe", microbatches=1, loss=total)
    line.step(call="eval")
    try:
        got = line.step(batch(4), batch(4), call="eval")
    except Exception:
        return []  # refused
    return unlike("output", plain(got), plain(line.forward(batch(4))) if line.last else None)


def subgroup(me: Me) -> list[str]:
    """Ranks 2 and 0 of three."""
    group: Any = dist.new_group([2, 0])
    return [] if me.rank == 1 else alike(me, EVERY, group=group)


def data_parallel(me: Me) -> list[str]:
    """Two pipelines, 0 1 and 2 3, each with half of the rows; DDP over 0 2 and over 1 3."""
    lines = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    half, place = divmod(me.rank, 2)
    found: list[str] = []
    for name in ("GPipe", "1F1B"):
        line = Pipeline(
            me,
            name,
            group=lines[half],
            stages=2,
            # torch's own, which its stages know
            wrap=lambda module: DistributedDataParallel(module, process_group=columns[place]),
        )
        x, y = batch(16), batch(16, 501)
        line.step(x.chunk(2)[half], y.chunk(2)[half])
        line.whole_step(x, y)
        for _, _, whole in line.params():
            whole.grad /= 2
        found += line.differences()
    return found


def split_and_merge(me: Me) -> list[str]:
    """Each kind of value that a step may be given, there and back."""
    x = torch.arange(12.0).view(6, 2)
    args, named = microbatch.split_args_kwargs_into_chunks((x, 5), {"y": {"z": x}}, 3)
    found = unlike("positional", args, [(part, 5) for part in x.chunk(3)])
    found += unlike("by name", named, [{"y": {"z": part}} for part in x.chunk(3)])
    merged = microbatch.merge_chunks([{"x": part} for part in x.chunk(3)], None)
    return found + unlike("merged", merged, {"x": x})


FACTS = rows(
    (
        chapter.must(
            "pipeline/several-values",
            "A stage hands on several tensors, one that it was given and integers among them, and "
            "their gradients come back.",
        ),
        several_values,
    ),
    (
        chapter.must(
            "pipeline/keywords",
            "Keyword arguments go to the stages of the rank that gives them: of a tensor each "
            "microbatch has its rows, and other values are given to each.",
        ),
        keywords,
    ),
    (
        chapter.must(
            "pipeline/other-dimension",
            "The batch may be in another dimension, as chunk specs say.",
            source="torch 2.13, torch.distributed.pipelining.microbatch",
        ),
        other_dimension,
    ),
    (
        chapter.must(
            "pipeline/input-gradient",
            "An input that requires a gradient gets that of the whole batch.",
        ),
        input_gradient,
    ),
    (
        chapter.must(
            "pipeline/static-metadata",
            "Where stages say what they are given and what they give, gradients are the same.",
        ),
        static,
    ),
    (
        chapter.must(
            "pipeline/frozen-first-stage",
            "Behind a first stage that is not trained, all others have their gradients.",
        ),
        frozen,
    ),
    (
        chapter.must(
            "pipeline/frozen-first-stage-without-bubbles",
            "Behind a first stage that is not trained, all others have their gradients, also with "
            "schedules that compute gradients of weights later.",
            rests_on=("pipeline/interleaved-zero-bubble", "pipeline/zbv", "pipeline/dual-pipe-v"),
        ),
        frozen_zero_bubble,
    ),
    (
        chapter.must(
            "pipeline/used-twice",
            "A stage may use a layer twice, add its input, and have parameters that no input "
            "reaches, or that are not used.",
        ),
        used_twice,
    ),
    (
        chapter.must(
            "pipeline/tied-stages",
            "A parameter that two stages of a rank share has the sum of both gradients, also with "
            "scale_grads.",
            rests_on="pipeline/means",
        ),
        tied,
    ),
    (
        chapter.must(
            "pipeline/statistics",
            "A step runs each stage once for each microbatch, with that microbatch: buffers that "
            "count are right.",
        ),
        statistics,
    ),
)


@world_sizes(2)
@pytest.mark.parametrize("fact", FACTS)
def test_stages(ranks: Ranks, fact: Fact) -> None:
    check_fact(ranks, fact)


@world_sizes(2)
@pytest.mark.parametrize(
    "fact",
    rows(
        (
            chapter.must(
                "pipeline/uneven-batch",
                "A batch that the microbatches do not divide evenly is computed as one process "
                "does, or refused.",
                needs=SIZES,
                rests_on="pipeline/eval",
            ),
            uneven,
        ),
        (
            chapter.must(
                "pipeline/other-batch-size",
                "A batch of another size than the first one is computed as one process does, or "
                "refused.",
                needs=SIZES,
                rests_on="pipeline/eval",
            ),
            other_size,
        ),
    ),
)
@deadline(10)
@not_probed()
def test_sizes(ranks: Ranks, fact: Fact) -> None:
    check_fact(ranks, fact)


@chapter.must(
    "pipeline/split-and-merge",
    "Positional and keyword arguments are split by their first dimension and merged again, and "
    "what is no tensor is given to each microbatch.",
    source="torch 2.13, torch.distributed.pipelining.microbatch",
)
@world_sizes(1)
@not_probed()
def test_split_and_merge(ranks: Ranks) -> None:
    check_fact(ranks, split_and_merge)


@chapter.must(
    "pipeline/subgroup",
    "In a group whose ranks are numbered otherwise than in the world, gradients are the same.",
)
@world_sizes(3)
def test_subgroup(ranks: Ranks) -> None:
    check_fact(ranks, subgroup)


@chapter.must(
    "pipeline/with-ddp",
    "Stages in DDP have the average of the gradients of several pipelines.",
    needs=REDUCED,
)
@world_sizes(4)
def test_with_ddp(ranks: Ranks) -> None:
    check_fact(ranks, data_parallel)

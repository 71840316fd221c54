"""Single layers: by columns, by rows, along a sequence, and the layouts of what goes in and out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor import parallel as tp

from conformance import Chapter, Me, Ranks, world_sizes
from conformance.spec.facts import Fact, check_fact, near, rows, unlike
from conformance.spec.tensor_parallel.facts import (
    Cut,
    filled,
    in_plan,
    line_of,
    part_of,
    unlike_whole,
    whole_numbers,
)

NEEDS = (
    *("op:broadcast", "op:scatter", "op:all_reduce", "reduce_op:sum"),
    *("op:all_gather_into_tensor", "op:reduce_scatter_tensor", "feature:coalescing"),
)
SEVERAL = ("op:all_to_all_single", *NEEDS)

chapter = Chapter(
    "tensor_parallel", source="torch 2.13 docs, torch.distributed.tensor.parallel", needs=NEEDS
)

PLACED: dict[Cut, Any] = {None: Replicate(), 0: Shard(0), -1: Shard(-1)}
CUTS: tuple[Cut, ...] = (None, 0, -1)


def linear(me: Me, bias: bool = True) -> Any:
    return filled(me, nn.Linear(6, 12, bias))


def rows_of_six() -> Tensor:
    return whole_numbers((6, 6), 7)


def colwise(me: Me) -> list[str]:
    found = unlike_whole(me, linear(me), tp.ColwiseParallel(), rows_of_six(), got=-1)
    return found + unlike_whole(
        me, linear(me, bias=False), tp.ColwiseParallel(), rows_of_six(), got=-1
    )


def rowwise(me: Me) -> list[str]:
    found = unlike_whole(me, linear(me), tp.RowwiseParallel(), rows_of_six(), given=-1)
    return found + unlike_whole(
        me, linear(me, bias=False), tp.RowwiseParallel(), rows_of_six(), given=-1
    )


def own_shards(me: Me) -> list[str]:
    """Which part of its parameters each rank has."""
    mesh, found = line_of(me), []
    for style, cuts in ((tp.ColwiseParallel(), (0, 0)), (tp.RowwiseParallel(), (1, None))):
        whole = linear(me)
        parts: Any = in_plan(whole, mesh, style)
        got = [p.to_local().detach().cpu() for p in parts.parameters()]
        want = [
            part_of(p.detach(), mesh, cut).cpu()
            for p, cut in zip(whole.parameters(), cuts, strict=True)
        ]
        found += unlike(type(style).__name__, got, want)
    return found


def embedding(me: Me, style: Any, got: Cut) -> list[str]:
    """With an index that has no gradient, and one that occurs twice."""
    words = torch.tensor([[0, 1, 2], [5, 11, 5]])
    module = filled(me, nn.Embedding(12, 6, padding_idx=1))
    return unlike_whole(me, module, style, words, got=got)


def embedding_by_columns(me: Me) -> list[str]:
    return embedding(me, tp.ColwiseParallel(), -1)


def embedding_by_rows(me: Me) -> list[str]:
    return embedding(me, tp.RowwiseParallel(input_layouts=Replicate()), None)


def any_layout(me: Me, style: Any, own_given: Cut, own_got: Cut, side: str) -> list[str]:
    """Of a style, with each layout of its input, or of its output, that it does not have anyway."""
    found = []
    for cut in CUTS:
        name = f"{side}_layouts"
        given, got = (cut, own_got) if side == "input" else (own_given, cut)
        told = unlike_whole(
            me, linear(me), style(**{name: PLACED[cut]}), rows_of_six(), given=given, got=got
        )
        found += [f"{style.__name__}, {name}={PLACED[cut]}: {text}" for text in told]
    return found


def layouts(me: Me, side: str) -> list[str]:
    found = any_layout(me, tp.ColwiseParallel, None, -1, side)
    return found + any_layout(me, tp.RowwiseParallel, -1, None, side)


def input_layouts(me: Me) -> list[str]:
    return layouts(me, "input")


def output_layouts(me: Me) -> list[str]:
    return layouts(me, "output")


def uneven(me: Me) -> list[str]:
    """Five and seven features: some ranks have more than others, and DTensors know it."""
    mesh = line_of(me)
    module = filled(me, nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 5)))
    plan = {"0": tp.ColwiseParallel(use_local_output=False), "1": tp.RowwiseParallel()}
    return unlike_whole(me, module, plan, whole_numbers((3, 5), 7), mesh=mesh)


def as_dtensors(me: Me) -> list[str]:
    mesh, whole, found = line_of(me), linear(me), []
    x = rows_of_six().to(me.device)
    for cut in CUTS:
        style = tp.ColwiseParallel(output_layouts=PLACED[cut], use_local_output=False)
        y = in_plan(whole, mesh, style)(x)
        if not isinstance(y, DTensor):
            return [f"{PLACED[cut]}: got {type(y).__name__}, want DTensor"]
        want = (Shard(1) if cut == -1 else PLACED[cut],)
        found += unlike(f"{want}: placements", y.placements, want)
        found += unlike(f"{want}: values", y.full_tensor().cpu(), whole(x).cpu())
    return found


def norm(me: Me) -> Any:
    return filled(me, nn.LayerNorm(4))


def sequence(me: Me) -> list[str]:
    """Ranks have parts of the sequence, and each parameter's gradient is that of all parts."""
    x, found = whole_numbers((2, 6, 4), 7), []
    for dim in (0, 1):
        if x.size(dim) % me.world_size:
            continue
        style = tp.SequenceParallel(sequence_dim=dim, use_local_output=True)
        found += unlike_whole(me, norm(me), style, x, given=dim, got=dim, compared=near)
    return found


class Told(nn.Module):
    """Returns what it was given, and its size where it is not told otherwise."""

    def forward(self, x: Any, times: Any = 1, *, y: Any = None) -> Any:
        return (x * times, y) if y is not None else x * times


def prepared(me: Me, style: Any, *inputs: Any, **named: Any) -> Any:
    return in_plan(Told(), line_of(me), style)(*inputs, **named)


def prepared_input(me: Me) -> list[str]:
    """One is gathered, and one is left as it is."""
    mesh, whole = line_of(me), rows_of_six().to(me.device)
    style = tp.PrepareModuleInput(
        input_layouts=(Shard(0), None), desired_input_layouts=(Replicate(), None)
    )
    got = prepared(me, style, part_of(whole, mesh, 0), 2)
    found = unlike("placements", got.placements, (Replicate(),))
    return found + unlike("values", got.to_local().cpu(), whole.cpu() * 2)


def prepared_keywords(me: Me) -> list[str]:
    mesh, whole = line_of(me), rows_of_six().to(me.device)
    style = tp.PrepareModuleInput(
        input_kwarg_layouts={"y": Shard(0)},
        desired_input_kwarg_layouts={"y": Replicate()},
        use_local_output=True,
    )
    got = prepared(me, style, torch.ones(2), y=part_of(whole, mesh, 0))
    return unlike("x and y", [x.cpu() for x in got], [torch.ones(2), whole.cpu()])


def prepared_output(me: Me) -> list[str]:
    mesh, whole = line_of(me), rows_of_six().to(me.device)
    desired: Any = (Shard(1), None)
    style = tp.PrepareModuleOutput(
        output_layouts=(Replicate(), None), desired_output_layouts=desired
    )
    cut, left = prepared(me, style, whole, y=whole)
    want = [part_of(whole, mesh, 1).cpu(), whole.cpu()]
    return unlike("outputs", [cut.cpu(), left.cpu()], want)


def prepared_gradients(me: Me) -> list[str]:
    """Parts are gathered before, and cut after: the gradients take the way back."""
    style = tp.PrepareModuleInputOutput(
        input_layouts=Shard(0),
        desired_input_layouts=Replicate(),
        output_layouts=Replicate(),
        desired_output_layouts=Shard(1),
    )
    return unlike_whole(me, Told(), style, rows_of_six(), given=0, got=1)


def other_dtensor(me: Me) -> list[str]:
    """A DTensor comes in another layout than was announced."""
    mesh, whole = line_of(me), rows_of_six().to(me.device)
    style = tp.PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate())
    got = prepared(me, style, distribute_tensor(whole, mesh, [Shard(0)]))
    return unlike("placements", got.placements, (Replicate(),))


def twice(me: Me) -> list[str]:
    """Layers that were called before are called again, with inputs of another size."""
    mesh, whole = line_of(me), linear(me)
    parallel, found = in_plan(whole, mesh, tp.ColwiseParallel(output_layouts=Replicate())), []
    for rows_ in (6, 2, 6):
        x = whole_numbers((rows_, 6), rows_).to(me.device)
        whole(x).sum().backward()
        parallel(x).sum().backward()
        got, want = (p.weight.grad for p in (parallel, whole))
        found += unlike(f"{rows_} rows", got.full_tensor().cpu(), want.cpu())
    return found


FACTS = rows(
    (
        chapter.must(
            "tp/own-shards",
            "After parallelize_module a rank has its chunk of the rows of a ColwiseParallel "
            "weight and bias; of a RowwiseParallel weight its columns, and the whole bias.",
        ),
        own_shards,
    ),
    (
        chapter.must(
            "tp/colwise",
            "A ColwiseParallel Linear gives each rank its columns of the whole layer's output, "
            "and the whole layer's gradients, with a bias or without.",
            rests_on="tp/own-shards",
        ),
        colwise,
    ),
    (
        chapter.must(
            "tp/rowwise",
            "A RowwiseParallel Linear that is given columns of the input gives each rank the "
            "whole layer's output, to which the bias is added once, and its gradients.",
            rests_on="tp/own-shards",
        ),
        rowwise,
    ),
    (
        chapter.must(
            "tp/embedding-by-columns",
            "A ColwiseParallel Embedding gives each rank its columns, and the gradients of the "
            "whole one, none for the padding index.",
        ),
        embedding_by_columns,
    ),
    (
        chapter.must(
            "tp/embedding-by-rows",
            "A RowwiseParallel Embedding finds words that other ranks have, and has the gradients "
            "of the whole one, none for the padding index.",
        ),
        embedding_by_rows,
    ),
    (
        chapter.must(
            "tp/input-layouts",
            "The input may be whole, or cut by rows or columns, as input_layouts say.",
            rests_on=("tp/colwise", "tp/rowwise"),
            needs=SEVERAL,
        ),
        input_layouts,
    ),
    (
        chapter.must(
            "tp/output-layouts",
            "The output is whole, or cut by rows or columns, as output_layouts say.",
            rests_on=("tp/colwise", "tp/rowwise"),
            needs=SEVERAL,
        ),
        output_layouts,
    ),
    (
        chapter.must(
            "tp/uneven-features",
            "Numbers of features that ranks cannot divide evenly give the numbers of the whole "
            "layers, where DTensors are handed on.",
            rests_on=("tp/colwise", "tp/rowwise"),
        ),
        uneven,
    ),
    (
        chapter.must(
            "tp/dtensor-outputs",
            "With use_local_output=False the output is a DTensor in the layout that was asked for.",
            rests_on="tp/colwise",
        ),
        as_dtensors,
    ),
    (
        chapter.must(
            "tp/sequence",
            "A SequenceParallel LayerNorm of parts of a sequence gives parts of the whole one's "
            "output, and gradients of its parameters that are those of the whole sequence.",
        ),
        sequence,
    ),
    (
        chapter.must(
            "tp/prepared-inputs",
            "PrepareModuleInput hands a module its inputs as DTensors in the desired layouts, and "
            "those without a layout as they are.",
        ),
        prepared_input,
    ),
    (
        chapter.must(
            "tp/prepared-keywords",
            "PrepareModuleInput hands a module keyword arguments in the desired layouts, with "
            "use_local_output as plain tensors.",
        ),
        prepared_keywords,
    ),
    (
        chapter.must(
            "tp/prepared-outputs",
            "PrepareModuleOutput brings a module's outputs into the desired layouts, and leaves "
            "those without a layout as they are.",
        ),
        prepared_output,
    ),
    (
        chapter.must(
            "tp/prepared-gradients",
            "Gradients go back through prepared inputs and outputs as through none at all.",
            rests_on=("tp/prepared-inputs", "tp/prepared-outputs"),
        ),
        prepared_gradients,
    ),
    (
        chapter.must(
            "tp/desired-layout",
            "A DTensor that comes in another layout than announced is brought into the desired "
            "one too.",
            rests_on="tp/prepared-inputs",
        ),
        other_dtensor,
    ),
    (
        chapter.must(
            "tp/called-again",
            "A layer can be called again, with another number of rows, and gradients add up.",
            rests_on="tp/colwise",
        ),
        twice,
    ),
)


@world_sizes(2, 3)
@pytest.mark.parametrize("fact", FACTS)
def test_layers(ranks: Ranks, fact: Fact) -> None:
    check_fact(ranks, fact)

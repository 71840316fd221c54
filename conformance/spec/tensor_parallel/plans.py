"""Plans for whole models: names, sources of the values, what is trained and saved, 2-D meshes."""

from __future__ import annotations

import copy
import warnings
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import parallel as tp

from conformance import Chapter, Me, Ranks, needs, world_sizes
from conformance.harness.traces import record
from conformance.spec.facts import Fact, check_fact, near, refusal, rows, unlike
from conformance.spec.tensor_parallel.facts import (
    filled,
    in_plan,
    line_of,
    mlp,
    mlp_plan,
    part_of,
    quietly,
    unlike_whole,
    whole_numbers,
    whole_of,
)

NEEDS = (
    *("op:broadcast", "op:scatter", "op:all_reduce", "reduce_op:sum"),
    *("op:all_gather_into_tensor", "op:reduce_scatter_tensor", "feature:coalescing"),
)

chapter = Chapter(
    "tensor_parallel", source="torch 2.13 docs, torch.distributed.tensor.parallel", needs=NEEDS
)


def pair_of_layers(me: Me) -> list[str]:
    found = unlike_whole(me, mlp(me), mlp_plan(), whole_numbers((4, 6), 7))
    return found + unlike_whole(me, mlp(me, bias=False), mlp_plan(), whole_numbers((4, 6), 7))


def one_reduction_each_way(me: Me) -> list[str]:
    group = record()
    mesh = DeviceMesh.from_group(group, me.device.type)
    model = in_plan(mlp(me), mesh, mlp_plan())
    x = whole_numbers((4, 6)).to(me.device).requires_grad_()
    group.take()
    y = model(x)
    forward = [issued.operation for issued in group.take()]
    y.sum().backward()
    backward = [issued.operation for issued in group.take()]
    return unlike("forward, backward", [forward, backward], [["all_reduce"], ["all_reduce"]])


class Block(nn.Module):
    """As in a transformer, beside a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.mlp = nn.Sequential(nn.Linear(4, 12), nn.ReLU(), nn.Linear(12, 4))

    def forward(self, x: Any) -> Any:
        return x + self.mlp(self.norm(x))


def block_plan() -> dict[str, Any]:
    return {
        "norm": tp.SequenceParallel(),
        "mlp": tp.PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        "mlp.0": tp.ColwiseParallel(),
        "mlp.2": tp.RowwiseParallel(output_layouts=Shard(1)),
    }


def block(me: Me) -> list[str]:
    x = whole_numbers((2, 6, 4), 7)
    return unlike_whole(me, filled(me, Block()), block_plan(), x, given=1, got=1, compared=near)


def placements(model: Any) -> dict[str, Any]:
    """Of each parameter, by name; None for one that is no DTensor."""
    return {
        name: param.placements[0] if isinstance(param, DTensor) else None
        for name, param in model.named_parameters()
    }


def wildcards(me: Me) -> list[str]:
    model = nn.Module()
    model.blocks = nn.Sequential(mlp(me, False), mlp(me, False))
    model.head = nn.Linear(6, 6, bias=False)
    as_it_is = tp.PrepareModuleOutput(
        output_layouts=Replicate(), desired_output_layouts=Replicate()
    )
    plan = {"blocks.*.0": tp.ColwiseParallel(), "blocks.1.?": as_it_is}
    got = placements(in_plan(model, line_of(me), plan))
    want = dict.fromkeys(got)
    want |= {"blocks.0.0.weight": Shard(0), "blocks.1.0.weight": Shard(0)}
    return unlike("placements", got, want)


def unmatched(me: Me) -> list[str]:
    plan = {"attention": tp.RowwiseParallel(), "0": tp.ColwiseParallel()}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        got = placements(in_plan(mlp(me, False), line_of(me), plan))
    found = unlike("placements", got, {"0.weight": Shard(0), "2.weight": None})
    is_told = any("attention" in str(warning.message) for warning in told)
    return found if is_told else [*found, "no warning names 'attention'"]


def whole_values(me: Me, plan: Any, **how: Any) -> list[Any]:
    """Of a layer in a model of the plan's depth, which each rank has filled otherwise, after it
    came under the plan."""
    model: nn.Module = nn.Linear(6, 12)
    for _ in next(iter(plan)).split("."):
        model = nn.Sequential(model)
    parallel = in_plan(filled(me, model, seed=10 * me.rank), line_of(me), plan, **how)
    return [whole_of(param) for param in parallel.parameters()]


def of_rank(me: Me, rank: int) -> list[Any]:
    return [p.detach().cpu() for p in filled(me, nn.Linear(6, 12), seed=10 * rank).parameters()]


def of_rank_zero(me: Me) -> list[str]:
    return unlike("parameters", whole_values(me, {"0": tp.ColwiseParallel()}), of_rank(me, 0))


def of_each_rank(me: Me) -> list[Any]:
    """Each rank's rows are its own."""
    every = [of_rank(me, rank) for rank in range(me.world_size)]
    return [
        torch.cat([one.chunk(me.world_size)[rank] for rank, one in enumerate(same_)])
        for same_ in zip(*every, strict=True)
    ]


def own_data(me: Me) -> list[str]:
    found = []
    for name in ("0", "0.0", "0.*.0"):
        got = whole_values(me, {name: tp.ColwiseParallel()}, src_data_rank=None)
        found += unlike(f"parameters of {name}", got, of_each_rank(me))
    return found


def own_data_of_the_whole_model(me: Me) -> list[str]:
    """The same, for a plan in which "" names the module itself."""
    model = filled(me, nn.Linear(6, 12), seed=10 * me.rank)
    parallel = in_plan(model, line_of(me), {"": tp.ColwiseParallel()}, src_data_rank=None)
    got = [whole_of(param) for param in parallel.parameters()]
    return unlike("parameters", got, of_each_rank(me))


def tied(me: Me) -> list[str]:
    model = nn.Sequential(nn.Embedding(12, 6), nn.Linear(6, 12, bias=False)).to(me.device)
    model[1].weight = model[0].weight
    plan = {
        "0": tp.RowwiseParallel(input_layouts=Replicate()),
        "1": tp.ColwiseParallel(output_layouts=Replicate()),
    }
    try:
        parallel = in_plan(model, line_of(me), plan)
    except Exception:
        return []
    return unlike("parameters", len(list(parallel.parameters())), 1)


def frozen(me: Me) -> list[str]:
    model = mlp(me)
    model[0].weight.requires_grad_(False)
    model[2].bias.requires_grad_(False)
    parallel = in_plan(model, line_of(me), mlp_plan())
    found = unlike(
        "trained", [p.requires_grad for p in parallel.parameters()], [False, True, True, False]
    )
    return found + unlike_whole(me, model, mlp_plan(), whole_numbers((4, 6), 7))


def refused(me: Me) -> list[str]:
    mesh, model = line_of(me), mlp(me)

    def called(style: Any) -> Any:
        two = torch.ones(2, device=me.device)
        return lambda: in_plan(nn.Identity(), mesh, style)(two)

    pair = (Replicate(), Replicate())
    wrong: list[tuple[str, Any, type[Exception]]] = [
        (
            "columns of a ReLU",
            lambda: in_plan(nn.ReLU(), mesh, tp.ColwiseParallel()),
            NotImplementedError,
        ),
        (
            "rows of a norm",
            lambda: in_plan(nn.LayerNorm(4), mesh, tp.RowwiseParallel()),
            NotImplementedError,
        ),
        ("a plan of another type", lambda: in_plan(model, mesh, [tp.ColwiseParallel()]), TypeError),
        (
            "layouts of another number of inputs",
            called(tp.PrepareModuleInput(input_layouts=pair, desired_input_layouts=pair)),
            ValueError,
        ),
        (
            "layouts of another number of outputs",
            called(tp.PrepareModuleOutput(output_layouts=pair, desired_output_layouts=pair)),
            ValueError,
        ),
    ]
    said = [(what, quietly(lambda c=call, k=kind: refusal(c, k))) for what, call, kind in wrong]
    return [f"{what}: {text}" for what, text in said if text.startswith("(")]


def steps(model: Any, inputs: Any, count: int = 3) -> Any:
    """An optimizer after some steps of the model."""
    optimizer = torch.optim.SGD(model.parameters(), 0.125, momentum=0.5)
    for step in range(count):
        optimizer.zero_grad()
        (model(inputs[step]).pow(2).mean()).backward()
        optimizer.step()
    return optimizer


def training(me: Me) -> list[str]:
    whole = mlp(me)
    parallel = in_plan(whole, line_of(me), mlp_plan())
    inputs = [whole_numbers((4, 6), seed).to(me.device) / 8 for seed in range(3)]
    optimizers = [steps(model, inputs) for model in (whole, parallel)]
    found = []
    pairs = zip(whole.named_parameters(), parallel.parameters(), strict=True)
    for (name, want), got in pairs:
        found += near(name, whole_of(got), want)
        states = [o.state[p] for o, p in zip(optimizers, (want, got), strict=True)]
        momenta = [whole_of(state["momentum_buffer"]) for state in states]
        found += near(f"momentum of {name}", momenta[1], momenta[0])
    return found


def state_dicts(me: Me) -> list[str]:
    whole, mesh = mlp(me), line_of(me)
    state = in_plan(whole, mesh, mlp_plan()).state_dict()
    got = {name: whole_of(value) for name, value in state.items()}
    want = {name: value.cpu() for name, value in whole.state_dict().items()}
    if found := unlike("state", got, want):
        return found
    other = in_plan(filled(me, copy.deepcopy(whole), seed=50), mesh, mlp_plan())
    other.load_state_dict(state)
    x = whole_numbers((4, 6), 7).to(me.device)
    return unlike("output with what was loaded", other(x).cpu() + 0.0, whole(x).cpu() + 0.0)


def square(me: Me) -> Any:
    return init_device_mesh(me.device.type, (2, 2), mesh_dim_names=("dp", "tp"))


def rows_of_ranks(me: Me) -> list[str]:
    """Each row of a mesh has a model and inputs of its own."""
    row = me.rank // 2
    model = filled(me, mlp(me), seed=20 * row)
    return unlike_whole(me, model, mlp_plan(), whole_numbers((4, 6), row), mesh=square(me)["tp"])


def with_fully_shard(me: Me) -> list[str]:
    """Rows of ranks have parts of the batch, columns of ranks have parts of the layers."""
    mesh, whole = square(me), mlp(me)
    parallel = in_plan(whole, mesh["tp"], mlp_plan())
    for layer in (parallel[0], parallel[2], parallel):
        fully_shard(layer, mesh=mesh["dp"])
    batch = whole_numbers((4, 6), 7).to(me.device)
    whole(batch).sum().div(2).backward()
    parallel(part_of(batch, mesh["dp"], 0)).sum().backward()
    found = []
    for (name, param), got in zip(whole.named_parameters(), parallel.parameters(), strict=True):
        found += unlike(f"gradient of {name}", whole_of(got.grad) + 0.0, param.grad.cpu() + 0.0)
    return found


FACTS = rows(
    (
        chapter.must(
            "tp/pair-of-layers",
            "A ColwiseParallel layer, an activation and a RowwiseParallel layer give the numbers "
            "of the whole layers, forward and backward.",
            rests_on=("tp/colwise", "tp/rowwise"),
        ),
        pair_of_layers,
    ),
    (
        chapter.should(
            "tp/one-reduction-each-way",
            "A ColwiseParallel layer followed by a RowwiseParallel one needs one all_reduce "
            "forward, one backward, and no other collective.",
            source="Megatron-LM, Shoeybi et al. 2019, section 3",
            rests_on="tp/pair-of-layers",
        ),
        one_reduction_each_way,
    ),
    (
        chapter.must(
            "tp/block",
            "A block whose norm and residual have parts of the sequence, and whose layers have "
            "parts of the features, gives the numbers of the whole block.",
            rests_on=("tp/sequence", "tp/prepared-inputs", "tp/pair-of-layers"),
        ),
        block,
    ),
    (
        chapter.must(
            "tp/wildcards",
            "A name of a plan may be a pattern in any of its parts, and is applied to all modules "
            "that it matches, and to no others.",
            rests_on="tp/own-shards",
        ),
        wildcards,
    ),
    (
        chapter.should(
            "tp/unmatched-names",
            "A name that no module has is warned of, and the rest of the plan is applied.",
            source="torch 2.13, parallelize_module",
            rests_on="tp/own-shards",
        ),
        unmatched,
    ),
    (
        chapter.must(
            "tp/source-rank",
            "Ranks that begin with different values all have parts of those of the first rank.",
            rests_on="tp/own-shards",
        ),
        of_rank_zero,
    ),
    (
        chapter.must(
            "tp/own-data",
            "With src_data_rank=None each rank keeps its part of its own values.",
            rests_on="tp/own-shards",
        ),
        own_data,
    ),
    (
        chapter.must(
            "tp/own-data-of-the-module",
            "src_data_rank=None also counts where the plan names the module itself, by the empty "
            "name.",
            rests_on="tp/own-data",
        ),
        own_data_of_the_whole_model,
    ),
    (
        chapter.must(
            "tp/tied",
            "A parameter that two layers share is one afterwards, too, or the plan is refused.",
            source="torch 2.13 docs, nn.Module.parameters: shared parameters are one",
            rests_on="tp/own-shards",
        ),
        tied,
    ),
    (
        chapter.must(
            "tp/frozen",
            "Parameters that are not trained stay so, and the others get their gradients.",
            rests_on="tp/pair-of-layers",
        ),
        frozen,
    ),
    (
        chapter.must(
            "tp/refused",
            "Layers that a style does not know are a NotImplementedError, a plan of another type "
            "is a TypeError, and layouts of another number of inputs or outputs are a ValueError.",
            source="torch 2.13, torch.distributed.tensor.parallel.style",
        ),
        refused,
    ),
    (
        chapter.must(
            "tp/training",
            "After steps of an optimizer, parameters and momentum are those of the whole model.",
            rests_on="tp/pair-of-layers",
        ),
        training,
    ),
    (
        chapter.must(
            "tp/state-dicts",
            "A state dict has the names and the values of the whole model, in DTensors, and can "
            "be loaded.",
            rests_on="tp/pair-of-layers",
        ),
        state_dicts,
    ),
)


@world_sizes(2)
@pytest.mark.parametrize("fact", FACTS)
def test_plans(ranks: Ranks, fact: Fact) -> None:
    check_fact(ranks, fact)


@world_sizes(4)
@pytest.mark.parametrize(
    "fact",
    rows(
        (
            chapter.must(
                "tp/rows-of-ranks",
                "Under one dimension of a mesh of two, each line of ranks has a model of its own.",
                rests_on="tp/pair-of-layers",
            ),
            rows_of_ranks,
        ),
        (
            chapter.must(
                "tp/with-fully-shard",
                "Sharded by fully_shard over the other dimension, the model has the gradients of "
                "the whole batch.",
                source="torch 2.13 docs, tensor parallelism, with FSDP in a mesh of two dimensions",
                rests_on="tp/pair-of-layers",
            ),
            with_fully_shard,
        ),
    ),
)
@needs("device:resizable_storage")
def test_plans_in_two_dimensions(ranks: Ranks, fact: Fact) -> None:
    check_fact(ranks, fact)


@st.composite
def networks(draw: st.DrawFn) -> tuple[tuple[int, bool, str], ...]:
    """Layers: features, with a bias or not, and a style or none."""
    layer = st.tuples(
        st.integers(1, 7), st.booleans(), st.sampled_from(["columns", "rows", "none"])
    )
    return tuple(draw(st.lists(layer, min_size=1, max_size=4)))


def drawn_network(me: Me, rows_: int, layers: tuple[tuple[int, bool, str], ...]) -> list[str]:
    sizes = [3, *(features for features, _, _ in layers)]
    model = nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(sizes)))
    plan = {}
    styles = {"columns": tp.ColwiseParallel, "rows": tp.RowwiseParallel}
    for place, (_, has_bias, style) in enumerate(layers):
        if not has_bias:
            layer: Any = model[place]
            layer.bias = None
        if style in styles:
            plan[str(place)] = styles[style](input_layouts=Replicate(), output_layouts=Replicate())
    x = whole_numbers((rows_, 3), rows_)
    found: list[str] = quietly(lambda: unlike_whole(me, filled(me, model), plan, x))
    return found


@chapter.must(
    "tp/any-network",
    "Linear layers of any sizes, each by columns, by rows or whole, give the numbers of the whole "
    "network, where what goes between them is whole.",
    rests_on=("tp/input-layouts", "tp/output-layouts", "tp/uneven-features"),
)
@world_sizes(3)
@settings(max_examples=10)
@given(rows_=st.integers(1, 4), layers=networks())
def test_any_network(ranks: Ranks, rows_: int, layers: Any) -> None:
    check_fact(ranks, drawn_network, rows_, layers)

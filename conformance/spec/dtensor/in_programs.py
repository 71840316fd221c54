"""DTensors in programs: made by factories, copied, saved, read as numbers; whole modules."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import tensor as dt
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, experimental

from conformance import Chapter, Me, Ranks, world_sizes
from conformance.spec.dtensor.distribute import SIZES, local_unlike, mine_of
from conformance.spec.dtensor.tables import mesh_of, whole_numbers
from conformance.spec.facts import Fact, check_fact, rows, unlike

NEEDS = (
    *("op:broadcast", "op:scatter", "op:all_reduce", "reduce_op:sum"),
    *("op:all_gather_into_tensor", "op:reduce_scatter_tensor", "op:all_to_all_single"),
    "feature:coalescing",
)

chapter = Chapter("dtensor", source="torch 2.13 docs, torch.distributed.tensor", needs=NEEDS)


def factories(me: Me) -> list[str]:
    mesh, found = mesh_of(me), []
    for size in SIZES:
        for placement in (Replicate(), Shard(0), Shard(1)):
            how: Any = {"device_mesh": mesh, "placements": [placement]}
            for name, got, want in (
                ("zeros", dt.zeros(size, **how), torch.zeros(size)),
                ("ones", dt.ones(size, **how), torch.ones(size)),
                ("full", dt.full(size, 7.0, **how), torch.full(size, 7.0)),
                ("ints", dt.ones(size, dtype=torch.int64, **how), torch.ones(size).long()),
            ):
                found += local_unlike(f"{name}, {size}, {placement}", got, want)
    return found


def copies(me: Me) -> list[str]:
    """They have the values, and memory of their own."""
    whole = whole_numbers((5, 4), 1)
    x = dt.distribute_tensor(whole.to(me.device), mesh_of(me), [Shard(0)])
    others = [copy.deepcopy(x), x.clone(), x.detach().clone()]
    x.to_local().zero_()
    return [t for y in others for t in local_unlike("copy", y, whole)]


def saved(me: Me) -> list[str]:
    """With torch.save, each rank its own part."""
    whole, file = whole_numbers((5, 4), 1), io.BytesIO()
    x = dt.distribute_tensor(whole.to(me.device), mesh_of(me), [Shard(0)])
    torch.save(x, file)
    file.seek(0)
    got = torch.load(file, weights_only=False)
    return local_unlike("loaded", got, whole) + unlike("at", got.placements, (Shard(0),))


def numbers(me: Me) -> list[str]:
    """Elements, and what was gathered before."""
    whole = whole_numbers((5, 4), 1)
    x = dt.distribute_tensor(whole.to(me.device), mesh_of(me), [Shard(0)])
    summed: Any = x.sum()
    total = summed.redistribute(placements=[Replicate()])
    got = [total.item(), float(x[3, 1]), bool(x[0, 0] == 9)]
    return unlike("numbers", got, [whole.sum().item(), float(whole[3, 1]), False])


def numbers_of_sums(me: Me) -> list[str]:
    """Of results to which each rank has its share."""
    whole = whole_numbers((5, 4), 1)
    x = dt.distribute_tensor(whole.to(me.device), mesh_of(me), [Shard(0)])
    calls: Any = (torch.sum, torch.max, torch.mean)
    try:
        got = [call(x).item() for call in calls]
    except RuntimeError:
        return []
    return unlike("numbers", got, [call(whole).item() for call in calls])


def linear_by_rows(_: str, module: Any, mesh: Any) -> None:
    for name, param in list(module.named_parameters(recurse=False)):
        sharded = nn.Parameter(dt.distribute_tensor(param, mesh, [Shard(0)]))
        module.register_parameter(name, sharded)


def modules(me: Me) -> list[str]:
    """Parts by a function, and what no function distributes is on all ranks."""
    torch.manual_seed(me.rank)
    whole = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6)).to(me.device)
    whole[1].bias.requires_grad_(False)
    for tensor in (*whole.parameters(), *whole.buffers()):
        if tensor.numel() > 1:
            dist.broadcast(tensor.data, 0)
    parts = dt.distribute_module(
        copy.deepcopy(whole),
        mesh_of(me),
        lambda name, module, mesh: linear_by_rows(name, module, mesh) if name == "0" else None,
    )
    found = []
    for name, want in [*whole.named_parameters(), *whole.named_buffers()]:
        got: Any = dict([*parts.named_parameters(), *parts.named_buffers()])[name]
        placement = Shard(0) if name.startswith("0") else Replicate()
        found += unlike(f"{name}: placement", got.placements, (placement,))
        found += unlike(f"{name}: is trained", got.requires_grad, want.requires_grad)
        found += local_unlike(name, got.detach(), want.detach().cpu())
    return found


def module_hooks(me: Me) -> list[str]:
    mesh, whole = mesh_of(me), whole_numbers((6, 4), 1)
    layer = nn.Linear(4, 2, bias=False).to(me.device)
    with torch.no_grad():
        layer.weight.copy_(whole_numbers((2, 4), 2))

    def given(_: Any, inputs: Any, mesh: Any) -> Any:
        return (
            DTensor.from_local(
                inputs[0], mesh, [Shard(0)], shape=torch.Size((6, 4)), stride=(4, 1)
            ),
        )

    parts = dt.distribute_module(
        layer, mesh, None, given, lambda _, output, mesh: output.full_tensor()
    )
    got = parts(mine_of(whole, mesh, Shard(0)).to(me.device))
    if isinstance(got, DTensor):
        return ["output: a DTensor"]
    return unlike("output", got.cpu() + 0, whole @ whole_numbers((2, 4), 2).t() + 0)


def local_maps(me: Me) -> list[str]:
    """A function of local tensors: rows of a product, and the sum of products of columns."""
    mesh, x, y = mesh_of(me), whole_numbers((5, 4), 1), whole_numbers((4, 3), 2)
    cases: list[Any] = [
        ([Shard(0)], [Replicate()], [Shard(0)]),
        ([Shard(1)], [Shard(0)], [Partial()]),
    ]
    found = []
    for at_x, at_y, out in cases:
        multiplied = experimental.local_map(
            torch.mm, out, (at_x, at_y), None, mesh, redistribute_inputs=True
        )
        given = [dt.distribute_tensor(z.to(me.device), mesh, [Shard(1)]) for z in (x, y)]
        got = multiplied(*given)
        if out == [Shard(0)]:
            got = DTensor.from_local(
                got.to_local(), mesh, out, shape=torch.Size((5, 3)), stride=(3, 1)
            )
        found += unlike(f"{out}", got.full_tensor().cpu() + 0, x @ y + 0)
    return found


FACTS = rows(
    (
        chapter.must(
            "dtensor/factories/values",
            "zeros, ones and full make DTensors of the size given, of which each rank has its "
            "part.",
        ),
        factories,
    ),
    (
        chapter.must(
            "dtensor/copies",
            "clone and deepcopy of a DTensor have its values in memory of their own.",
        ),
        copies,
    ),
    (
        chapter.must(
            "dtensor/saved",
            "A DTensor that torch.save wrote and torch.load read has its part and its layout.",
        ),
        saved,
    ),
    (
        chapter.must(
            "dtensor/numbers",
            "item, float and bool of a DTensor of one element give its number on every rank.",
        ),
        numbers,
    ),
    (
        chapter.must(
            "dtensor/numbers-of-sums",
            "item of a sum or an extreme along shards is that of the whole tensor, or an error.",
        ),
        numbers_of_sums,
    ),
    (
        chapter.must(
            "dtensor/modules/parameters",
            "distribute_module places parameters as its function does, and replicates all others "
            "and the buffers; those that were frozen stay so.",
        ),
        modules,
    ),
    (
        chapter.must(
            "dtensor/modules/inputs-and-outputs",
            "distribute_module passes inputs and outputs through the functions that it was given.",
        ),
        module_hooks,
    ),
    (
        chapter.must(
            "dtensor/local-map",
            "local_map brings DTensors into the layouts that it was told, and calls the function "
            "with the local tensors.",
            source="torch 2.13 docs, torch.distributed.tensor.experimental.local_map",
        ),
        local_maps,
    ),
)


@world_sizes(3)
@pytest.mark.parametrize("fact", FACTS)
def test_in_programs(ranks: Ranks, fact: Fact) -> None:
    check_fact(ranks, fact)

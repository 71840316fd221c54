"""distribute_tensor, and the way from local tensors and back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import tensor as dt
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from conformance import Chapter, Me, Ranks, world_sizes
from conformance.spec.dtensor.tables import mesh_of, part_of, placed, whole_numbers
from conformance.spec.facts import Fact, check_fact, rows, unlike
from conformance.spec.torch_versions import needs_argument

NEEDS = (
    *("op:broadcast", "op:scatter", "op:all_reduce", "reduce_op:sum"),
    *("op:all_gather_into_tensor", "op:reduce_scatter_tensor", "op:all_to_all_single"),
    "feature:coalescing",
)

chapter = Chapter("dtensor", source="torch 2.13 docs, torch.distributed.tensor", needs=NEEDS)

SIZES = ((6, 4), (5, 3), (1, 2), (0, 2), (2, 7, 3))


def mine_of(whole: Tensor, mesh: Any, *layout: Any) -> Tensor:
    return part_of(whole, layout, mesh.mesh.shape, mesh.get_coordinate())


def local_unlike(what: str, got: Any, whole: Tensor) -> list[str]:
    """What is wrong with this rank's part, and with the shape of the whole."""
    want = mine_of(whole, got.device_mesh, *got.placements)
    found = unlike(f"{what}: local", got.to_local().detach().cpu(), want)
    return found + unlike(f"{what}: shape", tuple(got.shape), tuple(whole.shape))


def distributed(me: Me, sizes: Any, dims: Any) -> list[str]:
    mesh, found = mesh_of(me), []
    for size in sizes:
        for dim in dims:
            whole = whole_numbers(size, 1)
            placement = Replicate() if dim is None else Shard(dim)
            got = dt.distribute_tensor(whole.to(me.device), mesh, [placement])
            found += local_unlike(f"{size}, {placement}", got, whole)
    return found


def shards(me: Me) -> list[str]:
    found = distributed(me, ((6, 6), (12, 6, 2)), (0, 1))
    whole = whole_numbers((2, 3, 5), 1)
    last = dt.distribute_tensor(whole.to(me.device), mesh_of(me), [Shard(-1)])
    return (
        found + local_unlike("Shard(-1)", last, whole) + unlike("at", last.placements, (Shard(2),))
    )


def replicas(me: Me) -> list[str]:
    whole = whole_numbers((5, 3), 1)
    got = dt.distribute_tensor(whole.to(me.device), mesh_of(me))
    return distributed(me, SIZES, (None,)) + local_unlike("no placements", got, whole)


def uneven(me: Me) -> list[str]:
    return distributed(me, ((5, 4), (7, 5)), (0, 1))


def empty(me: Me) -> list[str]:
    return distributed(me, ((1, 1), (0, 3), (2, 1, 0)), (0, 1))


def from_source(me: Me, source: int | None, seed: int) -> list[str]:
    """Each rank begins with values of its own; those of this seed are wanted."""
    mesh, found = mesh_of(me), []
    how = {} if source == 0 else {"src_data_rank": source}
    for placement in (Replicate(), Shard(0), Shard(1)):
        whole = whole_numbers((5, 4), me.rank).to(me.device)
        got = dt.distribute_tensor(whole, mesh, [placement], **how)
        found += local_unlike(str(placement), got, whole_numbers((5, 4), seed))
    return found


def first_rank(me: Me) -> list[str]:
    return from_source(me, 0, 0)


def source_rank(me: Me) -> list[str]:
    return from_source(me, 1, 1)


def own_data(me: Me) -> list[str]:
    return from_source(me, None, me.rank)


def dtypes(me: Me) -> list[str]:
    found = []
    for dtype in (torch.bool, torch.int64, torch.bfloat16, torch.float64):
        whole = whole_numbers((5, 3), 1, dtype)
        for placement in (Replicate(), Shard(0), Shard(1)):
            got = dt.distribute_tensor(whole.to(me.device), mesh_of(me), [placement])
            found += local_unlike(f"{dtype}, {placement}", got, whole)
            back = got.full_tensor().cpu()
            found += unlike(f"{dtype}, {placement}: back", back, whole)
    return found


def metadata(me: Me) -> list[str]:
    mesh = mesh_of(me)
    whole = torch.ones(5, 4, 3, device=me.device)
    got = dt.distribute_tensor(whole, mesh, [Shard(1)])
    return [
        *unlike("size, stride", (got.size(), got.stride()), (whole.size(), whole.stride())),
        *unlike("numel, ndim", (got.numel(), got.ndim), (60, 3)),
        *unlike("dtype, device", (got.dtype, got.device.type), (whole.dtype, me.device.type)),
        *unlike("layout", (got.placements, got.device_mesh == mesh), ((Shard(1),), True)),
    ]


def strides(me: Me) -> list[str]:
    """A transposed tensor and one with holes; the tensor itself is left as it is."""
    found = []
    for whole in (whole_numbers((4, 5), 1).t(), whole_numbers((5, 8), 1)[:, ::2]):
        for placement in (Shard(0), Shard(1), Replicate()):
            given = whole.to(me.device)
            got = dt.distribute_tensor(given, mesh_of(me), [placement])
            found += local_unlike(str(placement), got, whole)
            found += unlike("given", given.cpu(), whole)
    return found


def leaves(me: Me) -> list[str]:
    """Parameters stay parameters' leaves, and have gradients of their own layout."""
    given = whole_numbers((5, 4), 1).to(me.device).requires_grad_()
    got = dt.distribute_tensor(given, mesh_of(me), [Shard(0)])
    (got * 3).sum().backward()
    found = unlike("leaf", (got.is_leaf, got.requires_grad), (True, True))
    if not isinstance(got.grad, DTensor):
        return [*found, f"the gradient is a {type(got.grad).__name__}"]
    return found + local_unlike("gradient", got.grad, torch.full((5, 4), 3.0))


def refusals(me: Me) -> list[str]:
    mesh, whole = mesh_of(me), torch.ones(6, 4, device=me.device)
    sharded = dt.distribute_tensor(whole, mesh, [Shard(0)])
    two: Any = [Shard(0), Shard(1)]
    wrong: list[tuple[str, Any]] = [
        ("too many placements", lambda: dt.distribute_tensor(whole, mesh, two)),
        ("a DTensor in another layout", lambda: dt.distribute_tensor(sharded, mesh, [Shard(1)])),
        ("no such dimension", lambda: dt.distribute_tensor(whole, mesh, [Shard(2)])),
    ]
    found = []
    for what, call in wrong:
        try:
            call()
        except (ValueError, RuntimeError, IndexError, AssertionError):
            continue
        found.append(f"{what}: nothing was raised")
    return found


def local_memory(me: Me) -> list[str]:
    """What is written to the local tensor is seen in the whole."""
    mesh, whole = mesh_of(me), whole_numbers((5, 4), 1)
    got = dt.distribute_tensor(whole.clone().to(me.device), mesh, [Shard(0)])
    got.to_local().mul_(2)
    given = mine_of(whole, mesh, Shard(0)).clone().to(me.device)
    of_local = DTensor.from_local(given, mesh, [Shard(0)], shape=torch.Size((5, 4)), stride=(4, 1))
    given.add_(1)
    return [
        *unlike("to_local", got.full_tensor().cpu(), whole * 2),
        *unlike("from_local", of_local.full_tensor().cpu(), whole + 1),
    ]


def from_even_shards(me: Me) -> list[str]:
    mesh, n, found = mesh_of(me), me.world_size, []
    for dim in (0, 1):
        whole = whole_numbers((2 * n, 3 * n), 1)
        mine = mine_of(whole, mesh, Shard(dim)).to(me.device)
        got = DTensor.from_local(mine, mesh, [Shard(dim)])
        found += local_unlike(f"Shard({dim})", got, whole)
        found += unlike("stride", got.stride(), whole.stride())
        found += unlike("back", got.full_tensor().cpu(), whole)
    return found


def from_uneven_shards(me: Me) -> list[str]:
    mesh, found = mesh_of(me), []
    for size, dim in (((5, 3), 0), ((2, 7), 1), ((1, 4), 0)):
        for whole in (whole_numbers(size, 1), whole_numbers(size[::-1], 1).t()):
            mine = mine_of(whole, mesh, Shard(dim)).to(me.device)
            stride = whole.stride()
            got = DTensor.from_local(mine, mesh, [Shard(dim)], shape=whole.shape, stride=stride)
            found += unlike(f"{size}, {dim}: stride", got.stride(), stride)
            found += unlike(f"{size}, {dim}", got.full_tensor().cpu(), whole)
    return found


def run_check(me: Me) -> list[str]:
    mine = whole_numbers((2, 3), me.rank).to(me.device)
    got = DTensor.from_local(mine, mesh_of(me), [Replicate()], run_check=True)
    return unlike("values", got.to_local().cpu(), whole_numbers((2, 3), 0))


def whole_again(me: Me, placements: Any) -> list[str]:
    found = []
    for size in SIZES:
        for placement in placements:
            whole = whole_numbers(size, 1)
            got = placed(whole, mesh_of(me), (placement,)).full_tensor()
            found += unlike(f"{size}, {placement}", got.cpu() + 0, whole + 0)
            if type(got) is not Tensor:
                found.append(f"{placement}: a {type(got).__name__}")
    return found


def full_of_shards(me: Me) -> list[str]:
    return whole_again(me, (Replicate(), Shard(0), Shard(1)))


def full_of_sums(me: Me) -> list[str]:
    return whole_again(me, (Partial(), Partial("sum")))


def full_of_averages(me: Me) -> list[str]:
    return whole_again(me, (Partial("avg"),))


def full_of_extremes(me: Me) -> list[str]:
    return whole_again(me, (Partial("min"), Partial("max")))


def full_gradient(me: Me) -> list[str]:
    """Through full_tensor, and into the local tensor from which the whole was made."""
    mesh, n, found = mesh_of(me), me.world_size, []
    for placement in (Shard(0), Shard(1), Replicate()):
        whole, weight = whole_numbers((2 * n, 3 * n), 1), whole_numbers((2 * n, 3 * n), 2)
        mine = mine_of(whole, mesh, placement).to(me.device).requires_grad_()
        got = DTensor.from_local(mine, mesh, [placement]).full_tensor()
        (got * weight.to(me.device)).sum().backward()
        assert mine.grad is not None
        want = mine_of(weight, mesh, placement)
        found += unlike(f"{placement}", mine.grad.cpu(), want)
    return found


def summed_gradient(me: Me) -> list[str]:
    """Each rank's share of a sum has the gradient of the sum."""
    mesh, weight = mesh_of(me), whole_numbers((3, 4), 2)
    mine = whole_numbers((3, 4), me.rank).to(me.device).requires_grad_()
    share: Any = DTensor.from_local(mine, mesh, [Partial()])
    got = share.redistribute(placements=[Replicate()])
    (got.to_local() * weight.to(me.device)).sum().backward()
    assert mine.grad is not None
    return unlike("gradient", mine.grad.cpu(), weight)


def local_gradient(me: Me) -> list[str]:
    """Of each rank's own computation with what is the same on all: their sum, if so told."""
    mesh, n = mesh_of(me), me.world_size
    leaf = dt.distribute_tensor(whole_numbers((3, 4), 1).to(me.device), mesh, [Replicate()])
    leaf.requires_grad_()
    local = leaf.to_local(grad_placements=[Partial()])
    (local * whole_numbers((3, 4), 5 + me.rank).to(me.device)).sum().backward()
    want = sum(whole_numbers((3, 4), 5 + rank) for rank in range(n))
    grad: Any = leaf.grad
    return unlike("gradient", grad.full_tensor().cpu() + 0, want + 0)


def own_gradient(me: Me) -> list[str]:
    """Of a tensor that is the same on all ranks, whose gradient is to stay a sum's shares."""
    mine = whole_numbers((3, 4), 1).to(me.device).requires_grad_()
    as_shares: Any = [Partial()]
    whole: Any = DTensor.from_local(mine, mesh_of(me), [Replicate()], grad_placements=as_shares)
    weight = whole_numbers((3, 4), 5 + me.rank)
    (whole.to_local(grad_placements=as_shares) * weight.to(me.device)).sum().backward()
    assert mine.grad is not None
    return unlike("gradient", mine.grad.cpu(), weight)


@chapter.must(
    "dtensor/local/own-gradient",
    "from_local with grad_placements hands the gradient back in these, and not in those of the "
    "tensor.",
    rests_on="dtensor/local/grad-placements",
)
@world_sizes(3)
@needs_argument(DTensor.from_local, "grad_placements")
def test_own_gradient(ranks: Ranks) -> None:
    check_fact(ranks, own_gradient)


FACTS = rows(
    (
        chapter.must(
            "dtensor/distribute/shards",
            "distribute_tensor with Shard gives each rank its chunk of the tensor, along a "
            "dimension that may be counted from the end.",
        ),
        shards,
    ),
    (
        chapter.must(
            "dtensor/distribute/replicas",
            "distribute_tensor with Replicate, or with no placements, gives each rank the whole "
            "tensor.",
        ),
        replicas,
    ),
    (
        chapter.must(
            "dtensor/distribute/uneven",
            "Sizes that ranks do not divide evenly are cut as torch.chunk cuts them.",
            rests_on="dtensor/distribute/shards",
        ),
        uneven,
    ),
    (
        chapter.must(
            "dtensor/distribute/empty-shards",
            "Ranks for which nothing is left have an empty shard with the other sizes of the "
            "tensor.",
            rests_on="dtensor/distribute/shards",
        ),
        empty,
    ),
    (
        chapter.must(
            "dtensor/distribute/first-rank",
            "Where ranks pass different tensors, the DTensor has the values of the first rank.",
        ),
        first_rank,
    ),
    (
        chapter.must(
            "dtensor/distribute/source-rank",
            "With src_data_rank the DTensor has the values of that rank.",
            rests_on="dtensor/distribute/first-rank",
        ),
        source_rank,
    ),
    (
        chapter.must(
            "dtensor/distribute/own-data",
            "With src_data_rank=None each rank takes its part of its own tensor.",
            rests_on="dtensor/distribute/first-rank",
        ),
        own_data,
    ),
    (
        chapter.must(
            "dtensor/distribute/dtypes",
            "Tensors of bool, int64, bfloat16 and float64 are distributed and come back unchanged.",
            rests_on=("dtensor/distribute/uneven", "dtensor/full/shards"),
            needs=(*NEEDS, "dtype:bool", "dtype:int64", "dtype:bfloat16", "dtype:float64"),
        ),
        dtypes,
    ),
    (
        chapter.must(
            "dtensor/distribute/metadata",
            "A DTensor has size, stride, dtype and device of the whole tensor, and knows its mesh "
            "and its placements.",
        ),
        metadata,
    ),
    (
        chapter.must(
            "dtensor/distribute/strides",
            "Transposed tensors and tensors with gaps are distributed by their values, and are not "
            "changed themselves.",
            rests_on="dtensor/distribute/uneven",
        ),
        strides,
    ),
    (
        chapter.must(
            "dtensor/distribute/leaves",
            "A tensor that requires gradients becomes a leaf, whose gradient is a DTensor of its "
            "shape.",
        ),
        leaves,
    ),
    (
        chapter.must(
            "dtensor/distribute/refusals",
            "More placements than the mesh has dimensions, a dimension that the tensor does not "
            "have and a DTensor that has another layout already are errors.",
        ),
        refusals,
    ),
    (
        chapter.must(
            "dtensor/local/memory",
            "to_local and from_local share their memory with the DTensor.",
            rests_on="dtensor/full/shards",
        ),
        local_memory,
    ),
    (
        chapter.must(
            "dtensor/local/even-shards",
            "from_local joins equal shards to a DTensor of their common size and stride.",
        ),
        from_even_shards,
    ),
    (
        chapter.must(
            "dtensor/local/uneven-shards",
            "from_local with shape and stride joins shards of unequal sizes.",
            rests_on="dtensor/full/shards",
        ),
        from_uneven_shards,
    ),
    (
        chapter.must(
            "dtensor/local/checked",
            "from_local with run_check=True gives all replicas the values of the first rank.",
        ),
        run_check,
    ),
    (
        chapter.must(
            "dtensor/local/gradients",
            "The gradient of full_tensor reaches the local tensors from which the DTensor was "
            "made, each its own part.",
            rests_on="dtensor/local/even-shards",
        ),
        full_gradient,
    ),
    (
        chapter.must(
            "dtensor/local/summed-gradients",
            "Each rank's share of a sum has the whole gradient of the sum.",
            rests_on="dtensor/full/sums",
        ),
        summed_gradient,
    ),
    (
        chapter.must(
            "dtensor/local/grad-placements",
            "to_local with grad_placements of Partial sums the gradients of all ranks.",
            rests_on="dtensor/full/sums",
        ),
        local_gradient,
    ),
    (
        chapter.must(
            "dtensor/full/shards",
            "full_tensor puts even, uneven and empty shards together, on all ranks, as a plain "
            "tensor.",
        ),
        full_of_shards,
    ),
    (
        chapter.must(
            "dtensor/full/sums",
            "full_tensor of Partial adds what all ranks have.",
        ),
        full_of_sums,
    ),
    (
        chapter.must(
            "dtensor/full/averages",
            "full_tensor of Partial('avg') averages what all ranks have.",
            rests_on="dtensor/full/sums",
            needs=(*NEEDS, "reduce_op:avg"),
        ),
        full_of_averages,
    ),
    (
        chapter.must(
            "dtensor/full/extremes",
            "full_tensor of Partial('min') and Partial('max') takes the least and the largest of "
            "what all ranks have.",
            needs=(*NEEDS, "reduce_op:min", "reduce_op:max"),
        ),
        full_of_extremes,
    ),
)


@world_sizes(3)
@pytest.mark.parametrize("fact", FACTS)
def test_distribute(ranks: Ranks, fact: Fact) -> None:
    check_fact(ranks, fact)

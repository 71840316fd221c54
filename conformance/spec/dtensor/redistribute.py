"""redistribute: from any placement to any other, and the way back of gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from conformance import Chapter, Me, Ranks, world_sizes
from conformance.spec.dtensor.tables import mesh_of, part_of, placed, whole_numbers
from conformance.spec.facts import Fact, check_fact, rows, unlike

NEEDS = (
    *("op:all_reduce", "reduce_op:sum", "op:all_gather_into_tensor"),
    *("op:reduce_scatter_tensor", "op:all_to_all_single", "feature:coalescing"),
)
EXTREMES = ("reduce_op:min", "reduce_op:max")

chapter = Chapter("dtensor", source="torch 2.13 docs, DTensor.redistribute", needs=NEEDS)

EVEN, UNEVEN = (12, 6), (5, 4)
R, S0, S1 = Replicate(), Shard(0), Shard(1)
SUM, AVERAGE, LEAST, MOST = (Partial(op) for op in ("sum", "avg", "min", "max"))


def unlike_placed(what: str, got: Any, whole: Any, layout: Any) -> list[str]:
    """What is wrong with a DTensor that should have these values in this layout."""
    found = unlike(f"{what}: layout", tuple(got.placements), tuple(layout))
    found += unlike(f"{what}: shape", tuple(got.shape), tuple(whole.shape))
    got = got.detach()
    if any(p.is_partial() for p in got.placements):
        return found + unlike(f"{what}: sum", got.full_tensor().cpu() + 0, whole + 0)
    at = got.device_mesh.get_coordinate()
    want = part_of(whole, got.placements, got.device_mesh.mesh.shape, at)
    return found + unlike(f"{what}: local", got.to_local().cpu() + 0, want + 0)


def moved(me: Me, sources: Any, targets: Any, *, size: Any = EVEN, **how: Any) -> list[str]:
    mesh, found = mesh_of(me), []
    for source in sources:
        for target in targets:
            whole = whole_numbers(size, 1, how.get("dtype", torch.float32))
            x = placed(whole, mesh, (source,))
            got = x.redistribute(placements=[target], async_op=how.get("async_op", False))
            found += unlike_placed(f"{size}, {source} to {target}", got, whole, (target,))
            found += unlike_placed("what it was before", x, whole, (source,))
    return found


def cut(me: Me) -> list[str]:
    return moved(me, [R], [S0, S1, R])


def gathered(me: Me) -> list[str]:
    return moved(me, [S0, S1], [R])


def exchanged(me: Me) -> list[str]:
    return moved(me, [S0, S1], [S0, S1])


def uneven(me: Me) -> list[str]:
    return [t for size in (UNEVEN, (7, 3)) for t in moved(me, [R, S0, S1], [R, S0, S1], size=size)]


def empty(me: Me) -> list[str]:
    sizes = ((1, 4), (1, 1), (0, 3))
    return [t for size in sizes for t in moved(me, [R, S0, S1], [R, S0, S1], size=size)]


def reduced(me: Me) -> list[str]:
    return moved(me, [SUM], [R, SUM]) + moved(me, [SUM], [R], size=UNEVEN)


def reduced_and_cut(me: Me) -> list[str]:
    sizes = (EVEN, UNEVEN, (1, 3))
    return [text for size in sizes for text in moved(me, [SUM], [S0, S1], size=size)]


def averaged(me: Me) -> list[str]:
    return moved(me, [AVERAGE], [R, S0]) + moved(me, [AVERAGE], [R, S1], size=UNEVEN)


def extremes(me: Me) -> list[str]:
    return moved(me, [LEAST, MOST], [R, S0]) + moved(me, [LEAST, MOST], [R, S1], size=UNEVEN)


def integers(me: Me) -> list[str]:
    every = [R, S0, S1, SUM]
    return moved(me, every, [R, S0, S1], size=UNEVEN, dtype=torch.int64)


def halves(me: Me) -> list[str]:
    every = [R, S0, S1, SUM]
    return moved(me, every, [R, S0, S1], size=UNEVEN, dtype=torch.bfloat16)


def asynchronous(me: Me) -> list[str]:
    return moved(me, [R, S0, S1, SUM], [R, S0, S1], size=UNEVEN, async_op=True)


def turned(me: Me) -> list[str]:
    """Local tensors whose dimensions are exchanged in memory."""
    mesh, whole, found = mesh_of(me), whole_numbers((4, 5), 1), []
    for source in (S0, S1, R):
        for target in (S0, S1, R):
            x = placed(whole, mesh, (source,)).t()
            got = x.redistribute(placements=[target])
            found += unlike_placed(f"{x.placements} to {target}", got, whole.t(), (target,))
    return found


def gradients(me: Me, sources: Any, targets: Any) -> list[str]:
    """Of a weighted sum of what was redistributed."""
    mesh, whole, weight, found = mesh_of(me), whole_numbers(UNEVEN, 1), whole_numbers(UNEVEN, 2), []
    for source in sources:
        for target in targets:
            x = placed(whole, mesh, (source,)).requires_grad_()
            (x.redistribute(placements=[target]) * placed(weight, mesh, (R,))).sum().backward()
            grad: Any = x.grad
            got = grad.full_tensor().cpu() + 0
            found += unlike(f"{source} to {target}", got, weight + 0)
    return found


def gradients_of_shards(me: Me) -> list[str]:
    return gradients(me, [R, S0, S1], [R, S0, S1])


def gradients_of_sums(me: Me) -> list[str]:
    return gradients(me, [SUM], [R, S0, S1])


def counted(me: Me, changes: Sequence[tuple[Any, Any]], want: int) -> list[str]:
    """Whether each change of layout takes so many collectives."""
    from torch.distributed.tensor.debug import CommDebugMode  # and with it torch's compiler

    mesh, whole, found = mesh_of(me), whole_numbers(EVEN, 1), []
    for source, target in changes:
        x = placed(whole, mesh, (source,))
        with CommDebugMode() as counts:
            x.redistribute(placements=[target])
        found += unlike(f"{source} to {target}", counts.get_total_counts(), want)
    return found


def silent(me: Me) -> list[str]:
    """What each rank has already is not communicated."""
    return counted(me, ((R, S0), (R, R), (S1, S1), (SUM, SUM)), 0)


def one_collective(me: Me) -> list[str]:
    """A sum that goes to shards is not brought to all ranks first."""
    return counted(me, ((SUM, R), (SUM, S0), (S0, R)), 1)


def new_memory(me: Me) -> list[str]:
    """What is written to the result of a change of layout is not written to the original."""
    mesh, whole, found = mesh_of(me), whole_numbers(UNEVEN, 1), []
    for source, target in ((S0, R), (S0, S1), (SUM, R)):
        x = placed(whole, mesh, (source,))
        x.redistribute(placements=[target]).to_local().zero_()
        found += unlike_placed(f"{source} to {target}", x, whole, (source,))
    return found


FACTS = rows(
    (
        chapter.must(
            "dtensor/redistribute/replicas-to-shards",
            "A replicated tensor redistributed to Shard leaves each rank its chunk.",
        ),
        cut,
    ),
    (
        chapter.must(
            "dtensor/redistribute/shards-to-replicas",
            "A sharded tensor redistributed to Replicate is whole on every rank.",
        ),
        gathered,
    ),
    (
        chapter.must(
            "dtensor/redistribute/shards-to-shards",
            "A tensor sharded along one dimension can be redistributed to shards along another.",
        ),
        exchanged,
    ),
    (
        chapter.must(
            "dtensor/redistribute/uneven",
            "Tensors whose shards have different sizes are redistributed without loss, whole or "
            "along any dimension.",
            rests_on="dtensor/redistribute/shards-to-shards",
        ),
        uneven,
    ),
    (
        chapter.must(
            "dtensor/redistribute/empty-shards",
            "Tensors of which some ranks have nothing are redistributed without loss.",
            rests_on="dtensor/redistribute/uneven",
        ),
        empty,
    ),
    (
        chapter.must(
            "dtensor/redistribute/sums-to-replicas",
            "Partial redistributed to Replicate is the sum over all ranks, on every rank.",
        ),
        reduced,
    ),
    (
        chapter.must(
            "dtensor/redistribute/sums-to-shards",
            "Partial redistributed to Shard leaves each rank its chunk of the sum, also where "
            "chunks are uneven or empty.",
        ),
        reduced_and_cut,
    ),
    (
        chapter.must(
            "dtensor/redistribute/averages",
            "Partial('avg') redistributed to Replicate or Shard is the average over all ranks.",
            rests_on="dtensor/redistribute/sums-to-shards",
            needs=(*NEEDS, "reduce_op:avg"),
        ),
        averaged,
    ),
    (
        chapter.must(
            "dtensor/redistribute/extremes",
            "Partial('min') and Partial('max') redistributed to Replicate or Shard are the least "
            "and the largest numbers of all ranks.",
            rests_on="dtensor/redistribute/sums-to-shards",
            needs=(*NEEDS, *EXTREMES),
        ),
        extremes,
    ),
    (
        chapter.must(
            "dtensor/redistribute/integers",
            "Tensors of int64 are redistributed between shards, replicas and sums exactly.",
            rests_on=("dtensor/redistribute/uneven", "dtensor/redistribute/sums-to-shards"),
            needs=(*NEEDS, "dtype:int64"),
        ),
        integers,
    ),
    (
        chapter.must(
            "dtensor/redistribute/bfloat16",
            "Tensors of bfloat16 are redistributed between shards, replicas and sums, small whole "
            "numbers exactly.",
            rests_on=("dtensor/redistribute/uneven", "dtensor/redistribute/sums-to-shards"),
            needs=(*NEEDS, "dtype:bfloat16"),
        ),
        halves,
    ),
    (
        chapter.must(
            "dtensor/redistribute/asynchronous",
            "With async_op=True the result has the same values once it is used.",
            rests_on=("dtensor/redistribute/uneven", "dtensor/redistribute/sums-to-shards"),
        ),
        asynchronous,
    ),
    (
        chapter.must(
            "dtensor/redistribute/transposed",
            "A transposed DTensor is redistributed by its values, whatever the order in memory.",
            rests_on="dtensor/redistribute/uneven",
        ),
        turned,
    ),
    (
        chapter.must(
            "dtensor/redistribute/original",
            "What is written to a redistributed tensor in another layout does not change the "
            "original.",
        ),
        new_memory,
    ),
    (
        chapter.must(
            "dtensor/redistribute/gradients-of-shards",
            "The gradient of a redistributed replica or shard is that of the whole tensor.",
            rests_on="dtensor/redistribute/uneven",
        ),
        gradients_of_shards,
    ),
    (
        chapter.must(
            "dtensor/redistribute/gradients-of-sums",
            "The gradient of a redistributed sum is that of the whole tensor, on each rank that "
            "had a share.",
            rests_on="dtensor/redistribute/sums-to-replicas",
        ),
        gradients_of_sums,
    ),
    (
        chapter.should(
            "dtensor/redistribute/no-communication",
            "A replica that is cut, and a layout that stays, take no collective.",
            source="torch 2.13, torch.distributed.tensor._redistribute",
        ),
        silent,
    ),
    (
        chapter.should(
            "dtensor/redistribute/one-collective",
            "A sum that becomes a replica or shards, and shards that become a replica, take one "
            "collective where ranks divide the size evenly.",
            source="torch 2.13, torch.distributed.tensor._redistribute",
        ),
        one_collective,
    ),
)


@world_sizes(3)
@pytest.mark.parametrize("fact", FACTS)
def test_redistribute(ranks: Ranks, fact: Fact) -> None:
    check_fact(ranks, fact)

"""DDP gradient buckets: order, dtypes, size limits, rebuilding, and when each one is reduced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from conformance import (
    Chapter,
    Me,
    Ranks,
    assert_same_on_all_ranks,
    assert_that,
    covers,
    world_sizes,
)
from conformance.spec.ddp.models import WIDTH, InSequence, Recipe, Typed, normal
from conformance.spec.ddp.observing import buckets_seen, watched
from conformance.spec.ddp.training_runs import Options, batches, mine, train
from conformance.torch_private import bucket_assignment

REDUCER = "torch, reducer.cpp"
DOCS = "torch 2.13 docs, DistributedDataParallel"

chapter = Chapter("ddp")


BYTE = 2**-20  # of a MiB
ONE_MIB, DEFAULT_CAP = 2**20, 25 * 2**20
Kinds = Sequence[tuple[tuple[int, ...], str]]


def seen_by_hooks(
    ranks: Ranks, kinds: Kinds, order: Sequence[int], options: Options, steps: int = 3
) -> list[list[list[int]]]:
    """The buckets of each step, the same on all ranks."""
    recipe = Recipe(Typed, (kinds, order))
    data = batches(ranks.world_size, steps, (1, WIDTH))
    got = ranks.run_each(
        buckets_seen, [(recipe, options, mine(data, r)) for r in range(ranks.world_size)]
    )
    assert_same_on_all_ranks(got, what="buckets")
    first: list[list[list[int]]] = got[0]
    return first


def tensors_of(kinds: Kinds) -> list[Tensor]:
    return [torch.empty(shape, dtype=getattr(torch, dtype)) for shape, dtype in kinds]


def assert_buckets(got: Any, want: Any, step: int) -> None:
    assert_that(got == want, f"buckets of step {step + 1}: got {got}, want {want}")


def rebuilt(kinds: Kinds, ready: Sequence[int], limits: Sequence[int]) -> list[list[int]]:
    """torch's buckets of gradients that become ready in this order."""
    tensors = tensors_of(kinds)
    return bucket_assignment([tensors[i] for i in ready], limits, (), ready)


FLOATS: Kinds = [((10,), "float64"), ((3, 4), "float64"), ((1,), "float64"), ((20,), "float64")]


@chapter.must(
    "ddp/buckets/each-parameter-once",
    "In each backward pass every parameter is in exactly one bucket, and each bucket is reduced "
    "once.",
    source=REDUCER,
    rests_on="ddp/average",
)
@world_sizes(1, 2)
@pytest.mark.parametrize(
    "options",
    [{}, {"bucket_cap_mb": 100 * BYTE}, {"find_unused_parameters": True, "bucket_cap_mb": BYTE}],
    ids=str,
)
def test_each_parameter_once(ranks: Ranks, options: Options) -> None:
    for step, buckets in enumerate(seen_by_hooks(ranks, FLOATS, [2, 0, 3, 1], options)):
        places = sorted(place for bucket in buckets for place in bucket)
        assert_that(places == [0, 1, 2, 3], f"step {step + 1} reduced {buckets}")


@chapter.should(
    "ddp/buckets/initial",
    "Before the buckets are rebuilt, and without find_unused_parameters, there is one bucket per "
    "dtype, in the reverse order of registration.",
    source="torch 2.13, _BucketCapacityConfig.compute_bucket_size_limits",
    rests_on="ddp/buckets/each-parameter-once",
)
@world_sizes(2)
@pytest.mark.parametrize("options", [{}, {"bucket_cap_mb": BYTE}], ids=str)
def test_initial_buckets(ranks: Ranks, options: Options) -> None:
    kinds = [*FLOATS, ((4,), "float32"), ((5,), "float64")]
    first = seen_by_hooks(ranks, kinds, [0, 1, 2, 3, 4, 5], options, steps=1)[0]
    assert_buckets(first, [[4], [0, 1, 2, 3, 5]], 0)


@chapter.should(
    "ddp/buckets/initial-with-search",
    "With find_unused_parameters, buckets are limited in size from the first backward pass on, "
    "are in the reverse order of registration, and are not rebuilt.",
    source="torch 2.13, _BucketCapacityConfig.compute_bucket_size_limits; reducer.hpp, "
    "should_rebuild_buckets",
    rests_on="ddp/buckets/each-parameter-once",
)
@world_sizes(2)
def test_initial_buckets_with_search(ranks: Ranks) -> None:
    options = {"find_unused_parameters": True, "bucket_cap_mb": 100 * BYTE}
    want = bucket_assignment(tensors_of(FLOATS), [100])[::-1]
    for step, got in enumerate(seen_by_hooks(ranks, FLOATS, [2, 0, 3, 1], options)):
        assert_buckets(got, want, step)


@chapter.should(
    "ddp/buckets/rebuilt",
    "From the second backward pass on, buckets hold gradients in the order in which they became "
    "ready in the first.",
    source=f"{REDUCER}, rebuild_buckets",
    rests_on="ddp/buckets/each-parameter-once",
)
@chapter.should(
    "ddp/buckets/cap",
    "bucket_cap_mb limits the size of each bucket: a bucket is closed by the gradient that "
    "reaches the limit.",
    source=f"{DOCS}, argument bucket_cap_mb",
    rests_on="ddp/buckets/rebuilt",
)
@world_sizes(2, 3)
@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
def test_rebuilt_buckets(ranks: Ranks, static: bool) -> None:
    order = [2, 0, 3, 1]
    options = {"bucket_cap_mb": 100 * BYTE, "static_graph": static}
    seen = seen_by_hooks(ranks, FLOATS, order, options, steps=4)
    want = rebuilt(FLOATS, order[::-1], [100])
    # The first step of a static graph only records it.
    for step in range(2 if static else 1, 4):
        assert_buckets(seen[step], want, step)


@covers("ddp/buckets/cap", "ddp/buckets/one-dtype")
@world_sizes(2)
@settings(max_examples=15)
@given(
    kinds=st.lists(
        st.tuples(
            st.lists(st.integers(1, 6), min_size=1, max_size=2).map(tuple),
            st.sampled_from(["float32", "float64", "complex64"]),
        ),
        min_size=1,
        max_size=8,
    ),
    cap=st.integers(1, 200),
    data=st.data(),
)
def test_drawn_buckets(ranks: Ranks, kinds: Kinds, cap: int, data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(kinds))))
    seen = seen_by_hooks(ranks, kinds, order, {"bucket_cap_mb": cap * BYTE}, steps=2)
    assert_buckets(seen[1], rebuilt(kinds, order[::-1], [cap]), 1)


class OtherOrderLater(nn.Module):
    """Uses its parameters in another order each time."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.ones(i + 1).double() for i in range(3))

    def forward(self, x: Tensor, first: int) -> Tensor:
        for i in range(3):
            x = torch.tanh(x * self.weights[(first + i) % 3].sum()) + x
        return x


@chapter.should(
    "ddp/buckets/rebuilt-once",
    "Buckets are rebuilt once, even if gradients become ready in another order later.",
    source=f"{REDUCER}, rebuild_buckets",
    rests_on="ddp/buckets/rebuilt",
)
@world_sizes(2)
def test_buckets_are_rebuilt_once(ranks: Ranks) -> None:
    steps = [(normal((1, WIDTH), i), i) for i in range(4)]
    got = ranks.run(buckets_seen, Recipe(OtherOrderLater), {"bucket_cap_mb": BYTE}, steps)
    want = [[2], [1], [0]]
    for seen in got:
        for step in range(1, 4):
            assert_buckets(seen[step], want, step)


@chapter.must(
    "ddp/buckets/order-of-rank-0",
    "If gradients become ready in different orders on the ranks, all ranks have the buckets of "
    "rank 0, and the gradients are right.",
    source=f"{REDUCER}, sync_bucket_indices; pytorch#35137, DeepSpeed#2343",
    rests_on="ddp/average",
)
@world_sizes(2, 3)
def test_ranks_with_different_orders(ranks: Ranks) -> None:
    n = ranks.world_size
    orders = [[2, 0, 1], [0, 1, 2], [1, 2, 0]]
    steps = [[(normal((2, WIDTH), i + r), orders[r]) for r in range(n)] for i in range(3)]
    options = {"bucket_cap_mb": BYTE}
    train(ranks, Recipe(InSequence), steps, options)
    recipe = Recipe(InSequence)
    got = ranks.run_each(buckets_seen, [(recipe, options, mine(steps, r)) for r in range(n)])
    assert_same_on_all_ranks(got, what="buckets")
    assert_buckets(got[0][1], [[1], [0], [2]], 1)


class OfSizes(nn.Module):
    """Scales of the given sizes, whose elements count differently, in the order asked for."""

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__()
        self.scales = nn.ParameterList(torch.rand(size).double() for size in sizes)

    def forward(self, x: Tensor, order: Sequence[int]) -> Tensor:
        for i in order:
            scale = self.scales[i]
            shares = torch.arange(1, len(scale) + 1, dtype=x.dtype, device=x.device) / len(scale)
            x = torch.tanh(x * (scale * shares).sum()) + x
        return x


# Sizes, limit in bytes, and of each rank the order in which gradients become ready. A limit of 40
# makes of the order of "large between" [[0, 2, 1], [3]], and of the others three buckets each, of
# different sizes.
_LARGE_BETWEEN, _LARGE_FIRST, _LARGE_BOTH = [0, 2, 1, 3], [1, 0, 3, 2], [3, 1, 0, 2]
READY: dict[str, tuple[list[int], int, list[list[int]]]] = {
    "fewer-on-rank-0": ([2, 6, 2, 6], 40, [_LARGE_BETWEEN, _LARGE_FIRST, _LARGE_BOTH]),
    "more-on-rank-0": ([2, 6, 2, 6], 40, [_LARGE_FIRST, _LARGE_BETWEEN, _LARGE_BOTH]),
    "as-many": ([2, 6, 2, 6], 40, [_LARGE_BOTH, _LARGE_FIRST, _LARGE_BETWEEN]),
    "one-bucket": ([4, 4], DEFAULT_CAP, [[0, 1], [1, 0], [0, 1]]),
}


@covers("ddp/buckets/order-of-rank-0")
@world_sizes(2, 3)
@pytest.mark.parametrize("which", READY)
def test_ranks_whose_own_buckets_would_differ(ranks: Ranks, which: str) -> None:
    """In number and in sizes, or, in one bucket, in the places of parameters."""
    n = ranks.world_size
    sizes, cap, ready = READY[which]
    steps = [[(normal((2, WIDTH), i + r), ready[r][::-1]) for r in range(n)] for i in range(3)]
    options = {"bucket_cap_mb": cap * BYTE}
    recipe = Recipe(OfSizes, (sizes,))
    train(ranks, recipe, steps, options)
    got = ranks.run_each(buckets_seen, [(recipe, options, mine(steps, r)) for r in range(n)])
    assert_same_on_all_ranks(got, what="buckets")
    kinds = [((size,), "float64") for size in sizes]
    for step in (1, 2):
        assert_buckets(got[0][step], rebuilt(kinds, ready[0], [cap]), step)


@chapter.should(
    "ddp/buckets/small-first-bucket",
    "Without bucket_cap_mb the first rebuilt bucket is closed at 1 MiB, so that communication "
    "begins early, and the next at 25 MiB.",
    source="torch 2.13, _DEFAULT_FIRST_BUCKET_BYTES and _DEFAULT_BUCKET_CAP_MB",
    rests_on="ddp/buckets/rebuilt",
)
@world_sizes(2)
def test_the_first_bucket_is_small(ranks: Ranks) -> None:
    kinds: Kinds = [((2**17,), "float32")] * 5
    order = [0, 1, 2, 3, 4]
    seen = seen_by_hooks(ranks, kinds, order, {}, steps=2)
    assert_buckets(seen[1], rebuilt(kinds, order[::-1], [ONE_MIB, DEFAULT_CAP]), 1)


@chapter.should(
    "ddp/buckets/cap-list",
    "bucket_cap_mb_list gives the limit of each bucket in turn; the last limit applies to all "
    "that follow.",
    source="torch 2.13, test_ddp_bucket_cap_mb_list",
    rests_on="ddp/buckets/rebuilt",
)
@world_sizes(2)
@pytest.mark.parametrize("caps", [[8, 16], [16, 8, 24], [16]], ids=str)
def test_limits_bucket_by_bucket(ranks: Ranks, caps: list[int]) -> None:
    kinds: Kinds = [((1,), "float64")] * 8
    order = list(range(8))
    options = {"bucket_cap_mb_list": [cap * BYTE for cap in caps]}
    seen = seen_by_hooks(ranks, kinds, order, options, steps=2)
    assert_buckets(seen[0], bucket_assignment(tensors_of(kinds), caps)[::-1], 0)
    assert_buckets(seen[1], rebuilt(kinds, order[::-1], caps), 1)


# Of ComputeBucketAssignmentTest: kinds, limits in bytes, buckets. DDP reverses their order.
ASSIGNMENTS: list[tuple[Kinds, list[int], list[list[int]]]] = [
    (
        [((n,), "float32") for n in (100, 200, 100, 50)],
        [400],
        [[0], [1], [2], [3]],
    ),
    (
        [((50,), "float32"), ((25,), "float64")] * 3,
        [400],
        [[0, 2], [1, 3], [4], [5]],
    ),
    (
        [((10,), "float32")] * 4,
        [40, 80],
        [[0], [1, 2], [3]],
    ),
    (
        [((50,), "float32"), ((25,), "float64")] * 3,
        [200, 400],
        [[0], [1], [2, 4], [3, 5]],
    ),
]


@chapter.must(
    "ddp/buckets/one-dtype",
    "A bucket holds gradients of one dtype, and each dtype goes through the limits separately.",
    source="torch, test_c10d_common.py: ComputeBucketAssignmentTest; pytorch#62231",
    rests_on="ddp/buckets/each-parameter-once",
)
@world_sizes(2)
@pytest.mark.parametrize(
    ("kinds", "limits", "want"),
    ASSIGNMENTS,
    ids=["one-limit-one-dtype", "one-limit-dtypes", "limits-one-dtype", "limits-dtypes"],
)
def test_assignments_of_torchs_own_test(
    ranks: Ranks, kinds: Kinds, limits: list[int], want: list[list[int]]
) -> None:
    options = {
        "find_unused_parameters": True,
        "bucket_cap_mb_list": [limit * BYTE for limit in limits],
    }
    seen = seen_by_hooks(ranks, kinds, range(len(kinds)), options, steps=1)
    assert_buckets(seen[0], want[::-1], 0)


@chapter.should(
    "ddp/buckets/gradients-stay-whole",
    "A gradient larger than the limit is not split: it closes the bucket that it is in.",
    source=f"{REDUCER}, compute_bucket_assignment_by_size",
    rests_on="ddp/buckets/each-parameter-once",
)
@world_sizes(2)
def test_a_gradient_larger_than_the_limit(ranks: Ranks) -> None:
    kinds: Kinds = [((2,), "float64"), ((50,), "float64"), ((2,), "float64")]
    seen = seen_by_hooks(ranks, kinds, [0, 1, 2], {"bucket_cap_mb": 64 * BYTE}, steps=2)
    assert_buckets(seen[1], [[2, 1], [0]], 1)


@chapter.must(
    "ddp/buckets/launched-in-order",
    "Buckets are reduced in their order on every rank, whichever bucket is complete first.",
    source=f"{REDUCER}, next_bucket; collectives are called in one order by all ranks",
    rests_on="ddp/buckets/each-parameter-once",
)
@world_sizes(2)
def test_buckets_complete_in_another_order(ranks: Ranks) -> None:
    """Registration order is not the order of use, and the buckets are those of registration."""
    options = {"bucket_cap_mb": BYTE, "find_unused_parameters": True}
    for order in ([3, 2, 1, 0], [1, 3, 0, 2]):
        for step, got in enumerate(seen_by_hooks(ranks, FLOATS, order, options)):
            assert_buckets(got, [[3], [2], [1], [0]], step)


def launched_before_the_end(me: Me, steps: int) -> list[bool]:
    """In each step, whether the first bucket was reduced before the last gradient was computed."""
    module = Recipe(InSequence)().to(me.device)
    model = me.ddp(module, bucket_cap_mb=BYTE)
    seen: list[list[list[int]]] = []
    model.register_comm_hook(None, watched(seen, module))
    early = []
    module.get_parameter("scales.0").register_hook(lambda _: early.append(bool(seen[-1])))
    for i in range(steps):
        seen.append([])
        model(normal((2, WIDTH), i).to(me.device), [0, 1, 2]).sum().backward()
    return early


@chapter.should(
    "ddp/buckets/launched-early",
    "The reduction of a bucket begins while backward is still computing other gradients.",
    source=f"{DOCS}: reduction overlaps with backward",
    rests_on="ddp/buckets/rebuilt",
)
@world_sizes(2)
def test_reduction_begins_during_backward(ranks: Ranks) -> None:
    got = ranks.run(launched_before_the_end, 3)
    assert_same_on_all_ranks([early[1:] for early in got], [True, True], what="early")

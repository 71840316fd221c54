"""The collectives that the target's DDP issues, compared with those of torch's DDP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from conformance import Chapter, Ranks, assert_that, covers, world_sizes
from conformance.checks.traces import assert_same_trace
from conformance.spec.ddp.models import WIDTH, Branching, Perceptron, Recipe, Typed, normal
from conformance.spec.ddp.observing import trace, trace_both
from conformance.spec.ddp.training_runs import Options, batches, mine
from conformance.spec.torch_versions import has_batched_grad_copy, needs_forward_sync_buffers

OBSERVED = "observed, torch 2.13.0"

chapter = Chapter(
    "ddp", source="observed, torch 2.13.0; ranks with torch's DDP and others can share a job"
)


BYTE = 2**-20


class Buffered(nn.Module):
    """Buffers of several dtypes beside a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 2).double()
        self.register_buffer("numbers", torch.rand(5))
        self.register_buffer("more_numbers", torch.rand(2, 3))
        self.register_buffer("counts", torch.zeros(3, dtype=torch.int64))
        self.register_buffer("doubles", torch.rand(2, 2).double())

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y


def assert_same_traces(
    ranks: Ranks,
    recipe: Recipe,
    options: Options,
    steps: Sequence[Any],
    *,
    construction: bool = False,
) -> None:
    """Target and torch issue the same on each rank."""
    n = ranks.world_size
    got = ranks.run_each(trace_both, [(recipe, options, mine(steps, r)) for r in range(n)])
    for rank, (ours, theirs) in enumerate(got):
        if construction:
            assert_same_trace(ours.construction, theirs.construction, f"construction, rank {rank}")
        assert_same_trace(ours.of_steps, theirs.of_steps, f"steps, rank {rank}")


@chapter.should(
    "ddp/traces/construction",
    "Construction issues the collectives that torch's DDP issues, in the same order, with the "
    "same dtypes and numbers of elements.",
    rests_on="ddp/initial-state",
    needs="dtype:float64",
)
@world_sizes(1, 2)
@pytest.mark.parametrize("recipe", [Recipe(Perceptron), Recipe(Buffered)], ids=["plain", "buffers"])
@pytest.mark.parametrize("options", [{}, {"init_sync": False}], ids=str)
def test_construction(ranks: Ranks, recipe: Recipe, options: Options) -> None:
    assert_same_traces(ranks, recipe, options, [], construction=True)


@chapter.should(
    "ddp/traces/steps",
    "Training steps issue the collectives that torch's DDP issues, whatever the model, the caps "
    "and the options.",
    rests_on="ddp/average",
)
@world_sizes(1, 2, 3)
@pytest.mark.parametrize(
    "options",
    [{}, {"bucket_cap_mb": 100 * BYTE}, {"static_graph": True, "bucket_cap_mb": BYTE}],
    ids=str,
)
def test_steps(ranks: Ranks, options: Options) -> None:
    steps = batches(ranks.world_size, 4, (2, WIDTH))
    assert_same_traces(ranks, Recipe(Perceptron, ((WIDTH, 5, 4, 2),)), options, steps)


@covers("ddp/traces/steps")
@world_sizes(2)
@settings(max_examples=12)
@given(
    kinds=st.lists(
        st.tuples(
            st.lists(st.integers(1, 6), min_size=1, max_size=2).map(tuple),
            st.sampled_from(["float32", "float64", "complex64", "bfloat16"]),
        ),
        min_size=1,
        max_size=8,
    ),
    caps=st.lists(st.integers(1, 300), max_size=3),
    options=st.fixed_dictionaries(
        {},
        optional={
            "find_unused_parameters": st.just(True),
            "static_graph": st.just(True),
            "gradient_as_bucket_view": st.just(True),
            **({"batched_grad_copy": st.just(True)} if has_batched_grad_copy else {}),
        },
    ),
    data=st.data(),
)
def test_drawn_steps(
    ranks: Ranks, kinds: Any, caps: list[int], options: Options, data: st.DataObject
) -> None:
    order = data.draw(st.permutations(range(len(kinds))))
    if len(caps) == 1:
        options = {**options, "bucket_cap_mb": caps[0] * BYTE}
    elif caps:
        options = {**options, "bucket_cap_mb_list": [cap * BYTE for cap in caps]}
    steps = batches(2, 3, (1, WIDTH))
    assert_same_traces(ranks, Recipe(Typed, (kinds, order)), options, steps)


@chapter.should(
    "ddp/traces/unused-parameters",
    "If parameters go unused, on one rank or on all, steps issue the collectives that torch's "
    "DDP issues.",
    source=f"{OBSERVED}; one more all_reduce tells which parameters were used",
    rests_on="ddp/average",
)
@world_sizes(2)
@pytest.mark.parametrize("skip", [False, True], ids=["all", "skip"])
def test_steps_with_unused_parameters(ranks: Ranks, skip: bool) -> None:
    uses = [[[0], [0]], [[2, 1], [1, 2]], [[0, 1, 2], [0, 1, 2]]]
    if not skip:
        uses += [[[0], [1, 2]], [[1], [0]]]
    steps = [[(normal((2, WIDTH), r), used) for r, used in enumerate(step)] for step in uses]
    options = {
        "find_unused_parameters": True,
        "bucket_cap_mb": BYTE,
        "skip_all_reduce_unused_params": skip,
    }
    assert_same_traces(ranks, Recipe(Branching), options, steps)


@covers("ddp/traces/unused-parameters")
@world_sizes(2)
def test_a_static_graph_with_unused_parameters(ranks: Ranks) -> None:
    steps = [[(normal((2, WIDTH), r), [2, 0]) for r in range(2)] for _ in range(3)]
    options = {"static_graph": True, "bucket_cap_mb": BYTE}
    assert_same_traces(ranks, Recipe(Branching), options, steps)


@chapter.should(
    "ddp/traces/buffers",
    "Buffers are synchronised with the collectives that torch's DDP uses, before forward and at "
    "construction.",
    source="observed, torch 2.13.0; torch, reducer.cpp and comm.cpp, broadcast_coalesced",
    rests_on="ddp/initial-state",
    needs="dtype:float64",
)
@world_sizes(2, 3)
@pytest.mark.parametrize("sync", [True, False], ids=["synced", "apart"])
@needs_forward_sync_buffers
def test_steps_with_buffers(ranks: Ranks, sync: bool) -> None:
    steps = batches(ranks.world_size, 2, (2, WIDTH))
    assert_same_traces(
        ranks, Recipe(Buffered), {"forward_sync_buffers": sync}, steps, construction=True
    )


@chapter.must(
    "ddp/buckets/steady",
    "From the second step on, each step issues the same collectives with the same sizes.",
    source="DeepSpeed#7415: a counter that was not cleared",
    rests_on="ddp/average",
)
@world_sizes(2)
@pytest.mark.parametrize(
    "options",
    [{}, {"bucket_cap_mb": BYTE, "gradient_as_bucket_view": True}, {"static_graph": True}],
    ids=str,
)
def test_each_step_issues_the_same(ranks: Ranks, options: Options) -> None:
    steps = batches(2, 5, (2, WIDTH))
    recipe = Recipe(Perceptron, ((WIDTH, 5, 4, 2),))
    got = ranks.run_each(trace, [(recipe, options, mine(steps, r)) for r in range(2)])
    for rank, one in enumerate(got):
        backward = [issued for _, issued in one.steps]
        assert_that(bool(backward[1]), "backward issued nothing", rank)
        for step in range(2, 5):
            assert_same_trace(backward[step], backward[1], f"step {step + 1}, rank {rank}")

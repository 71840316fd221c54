"""FSDP's collectives compared with torch's and the docs: order, sizes, dtypes, prefetch, errors."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import BackwardPrefetch, MixedPrecision

from conformance import (
    Chapter,
    Me,
    Ranks,
    assert_same_on_all_ranks,
    assert_that,
    covers,
    world_sizes,
)
from conformance.checks.traces import assert_same_trace
from conformance.harness.traces import record
from conformance.spec.fsdp.models import Net, units_of
from conformance.spec.fsdp.recording import Exchange, exchanges, of_kind, trace_of_a_step
from conformance.spec.fsdp.training_runs import HYBRIDS, Recipe, both, both_kinds, train_step

TORCH = "observed, torch 2.13.0, a recorded process group"
DOCS = "torch 2.13 docs, FullyShardedDataParallel"

chapter = Chapter("fsdp")


Traces = tuple[list[Exchange], list[Exchange]]


def trace_of(me: Me, recipe: Recipe, cls: Any, reentrant: bool | None = None) -> list[Exchange]:
    """What construction, training and an evaluation issue."""
    group = record()
    if reentrant is None:
        model = recipe.wrapped(me, cls, process_group=group)
    else:
        model = _checkpointing(me, recipe, cls, group, reentrant)
    optimizer = recipe.optimizer_of(model)
    for step in range(recipe.steps):
        train_step(me, recipe, model, optimizer, step)
    with torch.no_grad():
        recipe.net.loss(model, me.rank, 0, me.device)
    return exchanges(group.take(), me.world_size)


def _checkpointing(me: Me, recipe: Recipe, cls: Any, group: Any, reentrant: bool) -> Any:
    kind = CheckpointImpl.REENTRANT if reentrant else CheckpointImpl.NO_REENTRANT
    model = recipe.wrapped(me, cls, process_group=group)
    for unit in type(model).fsdp_modules(model):
        if unit is not model:
            unit._fsdp_wrapped_module = checkpoint_wrapper(unit._fsdp_wrapped_module, kind)
    return model


def both_traces(me: Me, recipe: Recipe, reentrant: bool | None = None) -> Traces:
    """The trace of the target's FSDP, and that of torch's."""
    target, torchs = (trace_of(me, recipe, cls, reentrant) for cls in both(me))
    return target, torchs


def check_traces(ranks: Ranks, recipe: Recipe, reentrant: bool | None = None) -> None:
    for got, want in ranks.run(both_traces, recipe, reentrant):
        assert_that(bool(want), "torch issued nothing")
        assert_same_trace(got, want)


@chapter.must(
    "fsdp/trace-full-shard",
    "With FULL_SHARD a rank issues the collectives that torch's FSDP issues, in its order and "
    "with its numbers of elements.",
    source=TORCH,
)
@world_sizes(1, 2, 3)
@both_kinds
def test_full_shard(ranks: Ranks, orig: bool) -> None:
    for wrap in ("root", "blocks"):
        check_traces(ranks, Recipe(orig=orig, wrap=wrap, steps=2))


@chapter.must(
    "fsdp/trace-shard-grad-op",
    "With SHARD_GRAD_OP a rank issues torch's collectives in torch's order.",
    source=TORCH,
)
@world_sizes(2, 3)
@both_kinds
def test_shard_grad_op(ranks: Ranks, orig: bool) -> None:
    check_traces(ranks, Recipe(strategy="SHARD_GRAD_OP", orig=orig, steps=2))


@chapter.must(
    "fsdp/trace-no-shard",
    "With NO_SHARD a rank issues torch's collectives in torch's order.",
    source=TORCH,
)
@world_sizes(2)
@both_kinds
def test_no_shard(ranks: Ranks, orig: bool) -> None:
    check_traces(ranks, Recipe(strategy="NO_SHARD", orig=orig, steps=2))


def hybrid_traces(me: Me, recipe: Recipe) -> list[Traces]:
    """(inside, between) of the target's FSDP, and of torch's, four ranks two by two."""
    found = []
    for cls in both(me):
        inside = [record([0, 1]), record([2, 3])][me.rank // 2]
        between = [record([0, 2]), record([1, 3])][me.rank % 2]
        model = recipe.wrapped(me, cls, process_group=(inside, between))
        optimizer = recipe.optimizer_of(model)
        for step in range(recipe.steps):
            train_step(me, recipe, model, optimizer, step)
        found.append((exchanges(inside.take(), 2), exchanges(between.take(), 2)))
    return found


@chapter.must(
    "fsdp/trace-hybrid-shard",
    "With hybrid sharding a rank issues torch's collectives, in each of its two groups.",
    source=TORCH,
)
@chapter.must(
    "fsdp/hybrid-collectives",
    "Hybrid sharding gathers and scatters within the first group, and all-reduces one chunk per "
    "unit in the second.",
    source=f"{DOCS}, HYBRID_SHARD",
)
@world_sizes(4)
@pytest.mark.parametrize("strategy", HYBRIDS)
def test_hybrid_sharding(ranks: Ranks, strategy: str) -> None:
    recipe = Recipe(strategy=strategy, steps=2)
    chunks = sorted(unit.chunk for unit in units_of(recipe.net, 2))
    for rank, (got, want) in enumerate(ranks.run(hybrid_traces, recipe)):
        assert_same_trace(got[0], want[0], "inside")
        assert_same_trace(got[1], want[1], "between")
        kinds = {exchange.kind for exchange in got[0]}
        assert_that(kinds == {"all_gather", "reduce_scatter"}, f"inside: {kinds}", rank)
        between = sorted(of_kind(got[1], "all_reduce"))
        assert_that(between == sorted(2 * chunks), f"all-reduces of {between}, {chunks}", rank)


@chapter.must(
    "fsdp/trace-accumulation",
    "Several forwards and backwards before a step, synchronized or not, issue torch's "
    "collectives in torch's order.",
    source=TORCH,
)
@world_sizes(2)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_accumulation(ranks: Ranks, strategy: str) -> None:
    recipe = Recipe(strategy=strategy, steps=2)
    for orig in (False, True):
        check_traces(ranks, replace(recipe, orig=orig, micro_batches=3, no_sync=True))
        check_traces(ranks, replace(recipe, orig=orig, micro_batches=2))
        check_traces(ranks, replace(recipe, orig=orig, forwards=2))


@chapter.must(
    "fsdp/trace-checkpointed",
    "Units that recompute their activations gather as often as torch's FSDP does, in the same "
    "order.",
    source=TORCH,
)
@world_sizes(2)
@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_checkpointed_units(ranks: Ranks, reentrant: bool) -> None:
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP"):
        check_traces(ranks, Recipe(strategy=strategy, steps=2), reentrant)


@chapter.must(
    "fsdp/trace-prefetch",
    "Under every setting of prefetching, collectives are issued in torch's order.",
    source=TORCH,
)
@world_sizes(2)
@pytest.mark.parametrize("forward", [False, True], ids=["", "forward"])
def test_prefetching(ranks: Ranks, forward: bool) -> None:
    for backward in (BackwardPrefetch.BACKWARD_PRE, BackwardPrefetch.BACKWARD_POST, None):
        for limit in (False, True):
            kwargs = {
                "forward_prefetch": forward,
                "backward_prefetch": backward,
                "limit_all_gathers": limit,
            }
            check_traces(ranks, Recipe(net=Net(blocks=3), kwargs=kwargs, steps=2))


# Arithmetic


@chapter.must(
    "fsdp/silent-construction",
    "Without sync_module_states, wrapping exchanges nothing.",
    source="torch 2.13: chunks are cut locally",
)
@world_sizes(2, 3, 4, at_least=2)
@both_kinds
def test_construction(ranks: Ranks, orig: bool) -> None:
    for built, _, _ in ranks.run(trace_of_a_step, Recipe(orig=orig)):
        assert_same_trace(built, [], "construction")


@chapter.must(
    "fsdp/same-calls",
    "All ranks issue the same collectives with the same sizes, whatever their batches.",
    source="torch 2.13 docs: collectives are called by all ranks",
)
@world_sizes(2, 3, 4, at_least=2)
@both_kinds
def test_all_ranks_issue_the_same(ranks: Ranks, orig: bool) -> None:
    got = ranks.run(trace_of_a_step, Recipe(orig=orig))
    assert_same_on_all_ranks(got, what="exchanges")


@chapter.must(
    "fsdp/gather-sizes",
    "Each all-gather of a unit exchanges one padded chunk per rank.",
    source="torch 2.13, FlatParamHandle: chunks are padded to one size",
)
@chapter.must(
    "fsdp/scatter-sizes",
    "Each unit's gradient is reduced and scattered once in a backward, one padded chunk per rank.",
    source="torch 2.13, _reduce_grad",
)
@world_sizes(2, 3, 4, at_least=2)
@both_kinds
def test_sizes_of_a_step(ranks: Ranks, orig: bool) -> None:
    recipe = Recipe(orig=orig)
    chunks = [unit.chunk for unit in units_of(recipe.net, ranks.world_size, orig)]
    _, forward, backward = ranks.run(trace_of_a_step, recipe)[0]
    gathers = of_kind(forward, "all_gather")
    assert_that(gathers == chunks, f"the forward gathers {gathers}, want {chunks}")
    again = of_kind(backward, "all_gather")
    assert_that(again == chunks[:0:-1], f"the backward gathers {again}, want {chunks[:0:-1]}")
    scattered = of_kind(backward, "reduce_scatter")
    wanted = [*chunks[:0:-1], chunks[0]]
    assert_that(scattered == wanted, f"the backward scatters {scattered}, want {wanted}")
    assert_that(len(backward) == len(again) + len(scattered), f"the backward issues {backward}")


@chapter.must(
    "fsdp/silent-no-sync", "A backward under no_sync reduces nothing.", source=f"{DOCS}, no_sync"
)
@world_sizes(2)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_no_sync_reduces_nothing(ranks: Ranks, strategy: str) -> None:
    for rank, (quiet, _, backward) in enumerate(
        ranks.run(trace_of_a_step, Recipe(strategy=strategy), 2)
    ):
        reducing = [e for e in quiet if e.kind != "all_gather"]
        assert_that(not reducing, f"under no_sync: {', '.join(map(str, reducing))}", rank)
        assert_that(any(e.kind != "all_gather" for e in backward), "nothing after it", rank)


@chapter.must(
    "fsdp/gather-once",
    "With SHARD_GRAD_OP a unit is gathered only in the forward.",
    source=f"{DOCS}, SHARD_GRAD_OP: unsharded between forward and backward",
)
@world_sizes(2)
def test_the_backward_gathers_nothing(ranks: Ranks) -> None:
    for rank, (_, forward, backward) in enumerate(
        ranks.run(trace_of_a_step, Recipe(strategy="SHARD_GRAD_OP"))
    ):
        assert_that(len(of_kind(forward, "all_gather")) == 3, f"forward: {forward}", rank)
        again = of_kind(backward, "all_gather")
        assert_that(not again, f"the backward gathers {again}", rank)


@chapter.must(
    "fsdp/gather-never",
    "With NO_SHARD nothing is gathered, and each unit's gradient is all-reduced once.",
    source=f"{DOCS}, NO_SHARD",
)
@world_sizes(2)
def test_nothing_is_gathered(ranks: Ranks) -> None:
    sizes = sorted(unit.unpadded for unit in units_of(Net(), 1))
    for rank, (_, forward, backward) in enumerate(
        ranks.run(trace_of_a_step, Recipe(strategy="NO_SHARD"))
    ):
        assert_same_trace(forward, [], "forward")
        reduced = sorted(of_kind(backward, "all_reduce"))
        assert_that(
            reduced == sizes and len(backward) == len(sizes),
            f"the backward issues {', '.join(map(str, backward))}; want all-reduces of {sizes}",
            rank,
        )


# When the next unit is gathered


def gathers_at_hooks(me: Me, recipe: Recipe) -> tuple[list[int], list[int]]:
    """All-gathers so far when each block's forward begins, in the second iteration; and when the
    gradient of each block's input is there."""
    group = record()
    network = recipe.net.make()
    blocks = list(network.blocks)
    forwards: list[int] = []
    backwards: list[int] = []

    def count() -> int:
        return len(of_kind(exchanges(group.trace, me.world_size), "all_gather"))

    model = recipe.around(me, network, process_group=group)
    for block in blocks:
        block.register_forward_pre_hook(lambda *_: forwards.append(count()))
        block.register_full_backward_hook(lambda *_: backwards.append(count()))
    for number in range(2):
        group.take()
        forwards.clear()
        backwards.clear()
        loss = recipe.net.loss(model, me.rank, number, me.device)
        group.take()
        loss.backward()
    return forwards, backwards


@chapter.must(
    "fsdp/prefetch-before",
    "BACKWARD_PRE gathers the next unit before the gradients of the current one are computed.",
    source=f"{DOCS}, backward_prefetch",
)
@world_sizes(2)
def test_gathering_before(ranks: Ranks) -> None:
    recipe = Recipe(net=Net(blocks=3), kwargs={"backward_prefetch": BackwardPrefetch.BACKWARD_PRE})
    for rank, (_, backwards) in enumerate(ranks.run(gathers_at_hooks, recipe)):
        assert_that(backwards == [2, 3, 3], f"gathers after each gradient: {backwards}", rank)


@chapter.must(
    "fsdp/prefetch-after",
    "BACKWARD_POST gathers the next unit after the gradients of the current one are computed, "
    "and before those of the next unit are needed.",
    source=f"{DOCS}, backward_prefetch",
)
@world_sizes(2)
def test_gathering_after(ranks: Ranks) -> None:
    """A hook of a block's gradient runs before the block's parameters have theirs."""
    recipe = Recipe(net=Net(blocks=3), kwargs={"backward_prefetch": BackwardPrefetch.BACKWARD_POST})
    for rank, (_, backwards) in enumerate(ranks.run(gathers_at_hooks, recipe)):
        assert_that(backwards == [1, 2, 3], f"gathers after each gradient: {backwards}", rank)


@chapter.must(
    "fsdp/no-prefetch",
    "Without backward_prefetch a unit is gathered when its gradients are to be computed.",
    source=f"{DOCS}, backward_prefetch",
)
@world_sizes(2)
def test_gathering_when_needed(ranks: Ranks) -> None:
    recipe = Recipe(net=Net(blocks=3), kwargs={"backward_prefetch": None})
    for rank, (forwards, backwards) in enumerate(ranks.run(gathers_at_hooks, recipe)):
        assert_that(forwards == [2, 3, 4], f"gathers before each forward: {forwards}", rank)
        assert_that(backwards == [1, 2, 3], f"gathers after each gradient: {backwards}", rank)


@chapter.must(
    "fsdp/forward-prefetch",
    "With forward_prefetch, from the second iteration on, the next unit is gathered before the "
    "forward of the current one.",
    source=f"{DOCS}, forward_prefetch",
)
@world_sizes(2)
def test_gathering_in_the_forward(ranks: Ranks) -> None:
    recipe = Recipe(net=Net(blocks=3), kwargs={"forward_prefetch": True})
    for rank, (forwards, _) in enumerate(ranks.run(gathers_at_hooks, recipe)):
        assert_that(forwards == [3, 4, 4], f"gathers before each forward: {forwards}", rank)


# What is exchanged


@chapter.must(
    "fsdp/gather-dtype",
    "Parameters are gathered in the param_dtype.",
    source=f"{DOCS}, MixedPrecision, param_dtype",
)
@covers("fsdp/scatter-dtype")
@world_sizes(2)
@pytest.mark.parametrize(
    ("param", "reduce", "want"),
    [
        ("bfloat16", "float32", ("bfloat16", "float32")),
        ("bfloat16", None, ("bfloat16", "bfloat16")),
        (None, "bfloat16", ("float32", "bfloat16")),
        (None, None, ("float32", "float32")),
    ],
)
def test_dtypes(ranks: Ranks, param: str | None, reduce: str | None, want: tuple[str, str]) -> None:
    precision = MixedPrecision(
        param_dtype=getattr(torch, param) if param else None,
        reduce_dtype=getattr(torch, reduce) if reduce else None,
    )
    recipe = Recipe(net=Net(dtype="float32"), kwargs={"mixed_precision": precision})
    for rank, (_, forward, backward) in enumerate(ranks.run(trace_of_a_step, recipe)):
        seen = [{exchange.kind for exchange in trace} for trace in (forward, backward)]
        there = "all_gather" in seen[0] and "reduce_scatter" in seen[1]
        assert_that(there, f"issued {seen[0]} in forward and {seen[1]} in backward", rank)
        for exchange in (*forward, *backward):
            wanted = want[exchange.kind == "reduce_scatter"]
            assert_that(exchange.dtype == wanted, f"{exchange}, want {wanted}", rank)


def trace_of_clipping(me: Me) -> list[Exchange]:
    """What clip_grad_norm_ issues after a backward."""
    group = record()
    net = Net(dtype="float32")
    model = Recipe(net).wrapped(me, process_group=group)
    net.loss(model, me.rank, 0, me.device).backward()
    group.take()
    model.clip_grad_norm_(1.0)
    return exchanges(group.take(), me.world_size)


@chapter.should(
    "fsdp/norm-is-small",
    "clip_grad_norm_ exchanges a few numbers, not gradients.",
    source="torch 2.13, clip_grad_norm_: one all_reduce of one element for each kind of norm",
)
@world_sizes(2)
def test_clipping_exchanges_little(ranks: Ranks) -> None:
    for rank, trace in enumerate(ranks.run(trace_of_clipping)):
        few = bool(trace) and all(e.numel <= 4 for e in trace) and len(trace) <= 4
        assert_that(few, f"issued {', '.join(map(str, trace)) or 'nothing'}", rank)


# Ranks that go different ways


class Either(nn.Module):
    """Runs two units in one order or the other."""

    def __init__(self, me: Me) -> None:
        super().__init__()
        self.first, self.second = (me.fsdp(nn.Linear(3, 3)) for _ in range(2))
        self.swaps = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, other = (self.second, self.first) if self.swaps else (self.first, self.second)
        out: torch.Tensor = other(one(x))
        return out


def differ(me: Me) -> list[str]:
    """The first iteration takes another order on rank 0; what it says."""
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        either = Either(me)
        model = me.fsdp(either)
        either.swaps = me.rank == 0
        with torch.no_grad():
            model(torch.ones(1, 3, device=me.device))
        return []
    except RuntimeError as error:
        return [str(error)]
    finally:
        dist.set_debug_level(dist.DebugLevel.OFF)


@chapter.must(
    "fsdp/ranks-that-differ",
    "Under TORCH_DISTRIBUTED_DEBUG=DETAIL, ranks that gather different units in the first "
    "iteration all raise RuntimeError 'Forward order differs across ranks', before anything is "
    "computed with wrong parameters.",
    source="torch 2.13, _ExecOrderData; pytorch#170667",
)
@world_sizes(2, 3)
def test_ranks_that_gather_different_units(ranks: Ranks) -> None:
    for rank, messages in enumerate(ranks.run(differ)):
        said = " ".join(messages) or "nothing"
        right = "Forward order differs across ranks" in said
        assert_that(right, f"said {said}", rank)


def change_order(me: Me) -> list[int]:
    """How many warnings about the order each of three iterations gives; the first sets it."""
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        either = Either(me)
        model = me.fsdp(either)
        counts = []
        for swaps in (False, True, True):
            either.swaps = swaps
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                model(torch.ones(1, 3, device=me.device)).sum().backward()
            words = "Forward order differs from that of the first iteration"
            counts.append(int(any(words in str(w.message) for w in caught)))
        return counts
    finally:
        dist.set_debug_level(dist.DebugLevel.OFF)


@chapter.should(
    "fsdp/order-that-changes",
    "Under TORCH_DISTRIBUTED_DEBUG=DETAIL, a forward in another order than the first one's "
    "warns 'Forward order differs from that of the first iteration', in one iteration only.",
    source="torch 2.13, _ExecOrderData",
)
@world_sizes(2)
def test_an_order_that_changes(ranks: Ranks) -> None:
    assert_same_on_all_ranks(ranks.run(change_order), [0, 1, 0], what="iterations that warn")

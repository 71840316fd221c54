"""DDP's join(): what joined ranks contribute to hooks, buffers, unused and sparse gradients."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import distributed as torch_ddp

from conformance import (
    Chapter,
    Me,
    Ranks,
    assert_each_rank,
    assert_same_on_all_ranks,
    assert_that,
    covers,
    world_sizes,
)
from conformance.spec.ddp.models import (
    Branching,
    Perceptron,
    Recipe,
    Remembering,
    loss_of,
    numbered,
)
from conformance.spec.ddp.observing import unannotated
from conformance.spec.ddp.training_runs import assert_grads

DOCS = "torch 2.13 docs, DistributedDataParallel"

chapter = Chapter("ddp")

BYTE = 2**-20


def hook_under_join(me: Me, steps: int) -> tuple[int, list[Tensor]]:
    """How often the hook ran; the gradients."""
    module = Recipe(Perceptron)(seed=me.rank).to(me.device)
    model = me.ddp(module)
    calls = [0]

    @unannotated
    def average(_: Any, bucket: Any) -> Any:
        calls[0] += 1
        buffer = bucket.buffer().div_(me.world_size)
        work: Any = dist.all_reduce(buffer, async_op=True)
        return work.get_future().then(lambda f: f.value()[0])

    model.register_comm_hook(None, average)
    grads = []
    with model.join():
        for i in range(steps):
            model.zero_grad()
            loss_of(model(numbered(me.rank, i).to(me.device))).backward()
            grad = module.get_parameter("layers.0.weight").grad
            assert grad is not None
            grads.append(grad.clone())
    return calls[0], grads


@chapter.should(
    "ddp/join/comm-hook",
    "A communication hook runs on joined ranks too, with zeros.",
    source="observed, torch 2.13.0; test_ddp_uneven_inputs with a hook",
    rests_on="ddp/join/uneven-inputs",
)
@world_sizes(2)
def test_hooks_run_on_joined_ranks(ranks: Ranks) -> None:
    got = ranks.run_each(hook_under_join, [(2,), (4,)])
    for rank, (calls, _) in enumerate(got):
        assert_that(calls == 4, f"the hook ran {calls} times in 4 steps of one bucket", rank)
    for i, grad in enumerate(got[1][1]):
        module = Recipe(Perceptron)()
        for r in [0, 1] if i < 2 else [1]:
            (loss_of(module(numbered(r, i))) / 2).backward()
        want = module.get_parameter("layers.0.weight").grad
        assert_grads([grad], want, f"gradient of step {i + 1}")


def buckets_under_join(me: Me, steps: int) -> list[tuple[int, int, bool]]:
    """For each bucket that the hook gets: index, size, and whether it is the last one."""
    model = me.ddp(Recipe(Perceptron)().to(me.device), bucket_cap_mb=BYTE)
    seen = []

    @unannotated
    def note(_: Any, bucket: Any) -> Any:
        seen.append((bucket.index(), bucket.buffer().numel(), bucket.is_last()))
        work: Any = dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda f: f.value()[0])

    model.register_comm_hook(None, note)
    with model.join():
        for i in range(steps):
            loss_of(model(numbered(me.rank, i).to(me.device))).backward()
    return seen


@chapter.should(
    "ddp/join/buckets-of-hooks",
    "The hook of a joined rank gets buckets with the same index and size as on the other ranks, "
    "and the same one is the last.",
    source="torch, reducer.cpp: get_grad_buckets; hooks that keep state for each bucket",
    rests_on=("ddp/join/comm-hook", "ddp/buckets/cap"),
)
@world_sizes(2)
def test_hooks_of_joined_ranks_get_the_same_buckets(ranks: Ranks) -> None:
    got = [sorted(seen) for seen in ranks.run_each(buckets_under_join, [(2,), (4,)])]
    assert_that(len(got[1]) > 4, f"the hook got {got[1]}: one bucket in each step", 1)
    assert_same_on_all_ranks(got, got[1], what="buckets")


def buffers_under_join(me: Me, steps: int, every: int = 1) -> list[float]:
    """Whose buffer each forward began with.

    every: of so many passes the first is synchronised, and the others are not.
    """
    module = Remembering(me.rank).to(me.device)
    model = me.ddp(module)
    seen: list[float] = []
    module.register_forward_pre_hook(lambda *_: seen.append(module.whose.item()))
    with model.join():
        for i in range(steps):
            with contextlib.nullcontext() if i % every == 0 else model.no_sync():
                loss_of(model(numbered(me.rank, i).to(me.device))).backward()
    return seen


@chapter.must(
    "ddp/join/buffers",
    "Inside join() buffers get the values of a rank that still has input, before each forward.",
    source="torch, distributed.py: _find_common_rank among the ranks that have not joined",
    rests_on=("ddp/join/uneven-inputs", "ddp/buffers/before-forward"),
)
@world_sizes(2, 3)
def test_buffers_of_a_rank_that_has_input(ranks: Ranks) -> None:
    for lengths in ([2, 4, 3], [4, 3, 2]):
        lengths = lengths[: ranks.world_size]
        got = ranks.run_each(buffers_under_join, [(n,) for n in lengths])
        for rank, seen in enumerate(got):
            for i, whose in enumerate(seen[1:], 1):
                active = [r for r, n in enumerate(lengths) if i < n]
                words = f"forward {i + 1} began with the buffer of {whose}, not one of {active}"
                assert_that(whose in active, words, rank)


@covers("ddp/join/no-sync")
@world_sizes(2)
def test_buffers_after_passes_that_are_not_synchronised(ranks: Ranks) -> None:
    """They stay the rank's own, and ranks that have joined take part in no broadcast."""
    seen = ranks.run_each(buffers_under_join, [(5, 2), (3, 2)])[0]
    want = [1.0, 0.0, 0.0, 0.0]
    assert_that(seen[1:] == want, f"forwards began with the buffers of {seen[1:]}, not {want}", 0)


def buffer_hook_under_join(me: Me, steps: int) -> int:
    """How often the hook ran."""
    model = me.ddp(Remembering(me.rank).to(me.device))
    calls = [0]

    def add_up(_: Any, buffers: dict[str, Tensor]) -> None:
        calls[0] += 1
        for buffer in buffers.values():
            dist.all_reduce(buffer)

    location = torch_ddp._BufferCommHookLocation.PRE_FORWARD
    model._register_buffer_comm_hook(None, add_up, location)
    with model.join():
        for i in range(steps):
            loss_of(model(numbered(me.rank, i).to(me.device))).backward()
    return calls[0]


@chapter.should(
    "ddp/join/buffer-hook",
    "A buffer hook that runs before forward runs on joined ranks too.",
    source="torch, distributed.py: joined ranks call _check_and_sync_module_buffers",
    rests_on=("ddp/join/uneven-inputs", "ddp/buffers/hook"),
)
@world_sizes(2)
def test_buffer_hooks_run_on_joined_ranks(ranks: Ranks) -> None:
    got = ranks.run_each(buffer_hook_under_join, [(2,), (4,)])
    assert_same_on_all_ranks(got, 4, what="calls of the hook")


def unused_under_join(me: Me, uses: list[list[int]]) -> list[list[bool]]:
    """Which branches have a gradient after each step."""
    module = Recipe(Branching)().to(me.device)
    model = me.ddp(module, find_unused_parameters=True)
    seen = []
    with model.join():
        for i, used in enumerate(uses):
            model.zero_grad()
            loss_of(model(numbered(me.rank, i).to(me.device), used)).backward()
            seen.append([weight.grad is not None for weight in module.parameters()])
    return seen


@chapter.must(
    "ddp/join/unused-by-those-who-are-left",
    "With find_unused_parameters, a parameter that no rank with input used in a step keeps its "
    "gradient, also if it was used in an earlier step.",
    source=f"{DOCS}, find_unused_parameters and join",
    rests_on=("ddp/join/unused-parameters", "ddp/unused/everywhere"),
)
@world_sizes(2)
def test_nobody_who_is_left_uses_it(ranks: Ranks) -> None:
    uses = [[0, 1], [0, 1, 2], [0], [0, 2], [0]]
    got = ranks.run_each(unused_under_join, [(uses[:2],), (uses,)])
    wanted = [[k in used for k in range(3)] for used in uses]
    assert_that(got[1] == wanted, f"which have a gradient: {got[1]}, want {wanted}", 1)


def train_embedding(me: Me, steps: int) -> list[Tensor]:
    """Sparse gradients, made dense; step i of rank r uses row r + i."""
    module = nn.Embedding(5, 2, sparse=True).double().to(me.device)
    model = me.ddp(module)
    seen = []
    with model.join():
        for i in range(steps):
            model.zero_grad()
            model(torch.tensor([me.rank + i], device=me.device)).sum().backward()
            assert module.weight.grad is not None
            seen.append(module.weight.grad.to_dense().clone())
    return seen


@chapter.should(
    "ddp/join/sparse",
    "A joined rank contributes nothing to the sparse gradients of the others.",
    source=f"derived; {DOCS}, join; torch 2.13 raises",
    needs="feature:sparse",
    rests_on=("ddp/join/uneven-inputs", "ddp/sparse/average"),
)
@world_sizes(3)
def test_sparse_gradients_of_those_who_are_left(ranks: Ranks) -> None:
    lengths = [1, 3, 2]
    got = ranks.run_each(train_embedding, [(n,) for n in lengths])
    for i in range(3):
        left = [rank for rank in range(3) if i < lengths[rank]]
        want = torch.zeros(5, 2, dtype=torch.float64)
        for rank in left:
            want[rank + i] = 1 / 3
        assert_each_rank(
            [got[rank][i] for rank in left],
            [want] * len(left),
            within_ulps=2,
            what=f"gradient of step {i + 1}",
            ranks=left,
        )

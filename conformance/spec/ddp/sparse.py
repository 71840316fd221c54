"""Sparse gradients of embeddings under DDP: averaging, unused ones, buckets, known rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from conformance import Chapter, Me, Ranks, assert_same_on_all_ranks, assert_that, world_sizes
from conformance.spec.ddp.models import Recipe, loss_of
from conformance.spec.ddp.observing import unannotated
from conformance.spec.ddp.training_runs import Options, assert_grads
from conformance.spec.raising import assert_raised

REDUCER = "torch, reducer.cpp"

chapter = Chapter("ddp", needs="feature:sparse")


ROWS = 6
WORDS = [[[1, 3, 3], [0, 5], [5]], [[2, 2], [1, 3, 4], [4, 0]], [[0], [0], [0]]]  # [step][rank]
KNOWN = [0, 1, 2, 3, 5]  # rows of the first step, and one that no rank uses


class Embedding(nn.Module):
    """Words, between two of which lies a dense layer."""

    def __init__(self, sparse: bool = True, count: int = 1) -> None:
        super().__init__()
        self.words = nn.ModuleList(
            nn.Embedding(ROWS, 2, sparse=sparse).double() for _ in range(count)
        )
        self.layer = nn.Linear(2, 2).double()

    def forward(self, words: Tensor, used: bool = True) -> Tensor:
        x = torch.ones(1, 2, dtype=torch.float64, device=words.device)
        if used:
            for embedding in self.words:
                x = x + embedding(words)
        y: Tensor = self.layer(x)
        return torch.tanh(y)


def learn(
    me: Me, steps: list[list[int]], options: Options, unused: list[bool], sgd: bool = True
) -> list[tuple[bool, Tensor, Tensor]]:
    """After each step: whether the gradient is sparse, what it is, and the embedding."""
    module = Recipe(Embedding)(seed=me.rank).to(me.device)
    model = me.ddp(module, **options)
    optimizer = torch.optim.SGD(module.parameters(), 0.1 if sgd else 0.0)
    seen = []
    for words, skip in zip(steps, unused, strict=True):
        optimizer.zero_grad()
        loss_of(model(torch.tensor(words, device=me.device), not skip)).backward()
        optimizer.step()
        weight = module.get_parameter("words.0.weight")
        assert weight.grad is not None
        seen.append((weight.grad.is_sparse, weight.grad.to_dense(), weight.detach().clone()))
    return seen


def assert_learnt(ranks: Ranks, options: Options, unused: list[list[bool]]) -> None:
    n = ranks.world_size
    got = ranks.run_each(
        learn, [([s[r] for s in WORDS], options, [u[r] for u in unused]) for r in range(n)]
    )
    module = Recipe(Embedding, (False,))()
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    for i, step in enumerate(WORDS):
        optimizer.zero_grad()
        for r in range(n):
            (loss_of(module(torch.tensor(step[r]), not unused[i][r])) / n).backward()
        optimizer.step()
        weight = module.get_parameter("words.0.weight")
        now = [mine[i] for mine in got]
        assert_same_on_all_ranks([sparse for sparse, _, _ in now], True, what="sparse")
        assert_grads([grad for _, grad, _ in now], weight.grad, f"gradient of step {i + 1}")
        assert_grads([value for _, _, value in now], weight.detach(), f"rows after step {i + 1}")


@chapter.must(
    "ddp/sparse/average",
    "The sparse gradient of an embedding is the mean over the ranks, and stays sparse.",
    source=f"{REDUCER}, mark_variable_ready_sparse",
    rests_on="ddp/average",
)
@chapter.must(
    "ddp/sparse/training",
    "A model with sparse and dense parameters trains as in one process.",
    source="torch, test_c10d_gloo.py: test_sparse_gradients",
    rests_on="ddp/sparse/average",
)
@world_sizes(1, 3)
@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}], ids=["apart", "view"])
def test_embeddings(ranks: Ranks, options: Options) -> None:
    assert_learnt(ranks, options, [[False] * ranks.world_size] * 3)


@chapter.should(
    "ddp/sparse/unused-on-a-rank",
    "A sparse parameter that one rank does not use has the mean on all ranks.",
    source="torch, test_c10d_gloo.py: sparse gradients with find_unused_parameters",
    rests_on=("ddp/sparse/average", "ddp/unused/somewhere"),
)
@world_sizes(2)
def test_a_rank_does_not_use_the_embedding(ranks: Ranks) -> None:
    unused = [[False, True], [True, False], [False, False]]
    assert_learnt(ranks, {"find_unused_parameters": True}, unused)


class AddedEmbeddings(nn.Module):
    """Words and their places, added to what a layer gives."""

    def __init__(self, sparse: bool = True) -> None:
        super().__init__()
        self.words = nn.Embedding(ROWS, 2, sparse=sparse).double()
        self.places = nn.Embedding(ROWS, 2, sparse=sparse).double()
        self.layer = nn.Linear(2, 2).double()

    def forward(self, words: Tensor) -> Tensor:
        x = self.layer(torch.ones(1, 2, dtype=torch.float64, device=words.device))
        places = torch.arange(len(words), device=words.device)
        return torch.tanh(x + self.words(words) + self.places(places))


def learn_added(me: Me, steps: list[list[int]], options: Options, hooked: bool) -> list[Tensor]:
    """All gradients, dense, of each step."""
    module = Recipe(AddedEmbeddings)(seed=me.rank).to(me.device)
    model = me.ddp(module, **options)
    if hooked:
        model.register_comm_hook(None, default_hooks.allreduce_hook)
    seen = []
    for words in steps:
        model.zero_grad()
        loss_of(model(torch.tensor(words, device=me.device))).backward()
        for param in module.parameters():
            assert param.grad is not None
            seen.append(param.grad.to_dense().clone())
    return seen


@chapter.must(
    "ddp/sparse/added-embeddings",
    "The gradients of embeddings that are added, and of a layer that they are added to, are "
    "means over the ranks, also with a communication hook: the values of all these gradients may "
    "be in one tensor.",
    source="torch's embedding_sparse_backward gives a view of the output's gradient as the values",
    rests_on="ddp/sparse/average",
)
@world_sizes(2)
@pytest.mark.parametrize(
    ("options", "hooked"),
    [({}, False), ({"gradient_as_bucket_view": True}, False), ({}, True)],
    ids=["apart", "view", "hook"],
)
def test_added_embeddings(ranks: Ranks, options: Options, hooked: bool) -> None:
    got = ranks.run_each(learn_added, [([s[r] for s in WORDS], options, hooked) for r in range(2)])
    module = Recipe(AddedEmbeddings, (False,))()
    names = [name for name, _ in module.named_parameters()]
    for i, step in enumerate(WORDS):
        module.zero_grad()
        for words in step[:2]:
            (loss_of(module(torch.tensor(words))) / 2).backward()
        for j, param in enumerate(module.parameters()):
            grads = [mine[i * len(names) + j] for mine in got]
            assert_grads(grads, param.grad, f"gradient of {names[j]} in step {i + 1}")


def sparse_buckets(me: Me) -> list[list[int]]:
    """Sizes of the buckets' parameters, as a hook sees them."""
    module = Recipe(Embedding, (True, 2))().to(me.device)
    model = me.ddp(module)
    seen: list[list[int]] = []

    @unannotated
    def hook(_: Any, bucket: Any) -> Any:
        seen.append([parameter.numel() for parameter in bucket.parameters()])
        future: Any = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    model.register_comm_hook(None, hook)
    for _ in range(2):
        loss_of(model(torch.tensor([1, 2], device=me.device))).backward()
    return seen


@chapter.should(
    "ddp/sparse/bucket-of-its-own",
    "Each sparse gradient has a bucket of its own, whatever the cap.",
    source=f"{REDUCER}, compute_bucket_assignment_by_size",
    rests_on="ddp/sparse/average",
)
@world_sizes(1, 2)
def test_sparse_gradients_have_buckets_of_their_own(ranks: Ranks) -> None:
    for rank, seen in enumerate(ranks.run(sparse_buckets)):
        alone = sum(sizes == [2 * ROWS] for sizes in seen)
        assert_that(alone == 4, f"buckets of two steps: {seen}", rank)


def dense_instead(me: Me) -> None:
    module = Recipe(Embedding)().to(me.device)
    model = me.ddp(module)
    embedding: Any = module.get_submodule("words.0")
    embedding.sparse = False
    loss_of(model(torch.tensor([1], device=me.device))).backward()


@chapter.should(
    "ddp/sparse/dense-where-sparse-is-expected",
    "A dense gradient of a parameter whose layer promised sparse ones makes backward raise "
    "RuntimeError 'Expected variable to have sparse gradient'.",
    source=f"{REDUCER}, mark_variable_ready_sparse",
    needs="dtype:float64",
)
@world_sizes(1, 2)
def test_a_dense_gradient_instead(ranks: Ranks) -> None:
    outcomes = ranks.outcomes(dense_instead)
    assert_raised(outcomes, RuntimeError, match="Expected variable to have sparse gradient")


def with_metadata(me: Me, words: list[int]) -> tuple[list[int], Tensor]:
    """Rows of the gradient, and the gradient."""
    module = Recipe(Embedding)(seed=0).to(me.device)
    model = me.ddp(module)
    rows = torch.tensor(KNOWN, device=me.device)
    model._set_sparse_metadata({"words.0.weight": rows})
    loss_of(model(torch.tensor(words, device=me.device))).backward()
    grad = module.get_parameter("words.0.weight").grad
    assert grad is not None
    coalesced = grad.coalesce()
    return coalesced.indices()[0].tolist(), coalesced.to_dense()


@chapter.should(
    "ddp/sparse/metadata",
    "After _set_sparse_metadata, the rows that it lists are averaged, and the gradient has "
    "exactly these rows.",
    source="observed, torch 2.13.0, _set_sparse_metadata",
    rests_on="ddp/sparse/average",
)
@world_sizes(2)
def test_rows_that_are_known_beforehand(ranks: Ranks) -> None:
    got = ranks.run_each(with_metadata, [(words,) for words in WORDS[0][:2]])
    assert_same_on_all_ranks([rows for rows, _ in got], KNOWN, what="rows")
    module = Recipe(Embedding, (False,))()
    for words in WORDS[0][:2]:
        (loss_of(module(torch.tensor(words))) / 2).backward()
    want = module.get_parameter("words.0.weight").grad
    assert_grads([grad for _, grad in got], want, "gradient")

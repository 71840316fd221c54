"""DDP's errors about parameters that got no gradient, or got it twice: words, names, repetition."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from conformance import Chapter, Me, Ranks, assert_same_on_all_ranks, assert_that, world_sizes
from conformance.spec.ddp.models import WIDTH, Branching, Recipe, loss_of, normal
from conformance.spec.raising import assert_raised

REDUCER = "torch, reducer.cpp"

chapter = Chapter("ddp")


def step_twice(
    me: Me, uses: list[int], ignored: list[str], debug: bool, again: bool = False
) -> list[str]:
    """What the forward passes after a step without some branches say."""
    if debug:
        dist.set_debug_level(dist.DebugLevel.INFO)
    try:
        module = Recipe(Branching)().to(me.device)
        if ignored:
            kind: Any = me.ddp(Branching().to(me.device)).__class__
            kind._set_params_and_buffers_to_ignore_for_model(module, ignored)
        model = me.ddp(module)
        x = normal((2, WIDTH), me.rank).to(me.device)
        loss_of(model(x, uses)).backward()
        said = []
        for _ in range(2 if again else 1):
            try:
                model(x, uses)
                said.append("")
            except RuntimeError as error:
                said.append(str(error))
        return said
    finally:
        dist.set_debug_level(dist.DebugLevel.OFF)


@chapter.must(
    "ddp/unused/error-without-search",
    "Without find_unused_parameters, a step in which a parameter went unused makes the next "
    "forward raise RuntimeError 'Expected to have finished reduction', with the rank and the "
    "parameters' indices.",
    source=f"{REDUCER}, ensure_prior_reduction_finished; pytorch#22049",
    needs="dtype:float64",
)
@world_sizes(1, 2)
def test_the_next_forward_raises(ranks: Ranks) -> None:
    for rank, [said] in enumerate(ranks.run(step_twice, [1], [], False)):
        for words in (
            "Expected to have finished reduction in the prior iteration before starting a new one.",
            "find_unused_parameters=True",
            f"Parameter indices which did not receive grad for rank {rank}: 0 2",
        ):
            assert_that(words in said, f"{words!r} is not in {said!r}", rank)


@chapter.should(
    "ddp/unused/error-with-names",
    "With TORCH_DISTRIBUTED_DEBUG=INFO, the error about an unfinished reduction names the "
    "parameters.",
    source="torch 2.13, test_ddp_multiple_nested_unused_params_error",
    rests_on="ddp/unused/error-without-search",
)
@world_sizes(2)
def test_the_error_names_the_parameters(ranks: Ranks) -> None:
    for rank, [said] in enumerate(ranks.run(step_twice, [1], [], True)):
        head, _, names = said.partition(f"Parameters which did not receive grad for rank {rank}: ")
        named = sorted(names.partition("\n")[0].split(", "))
        wanted = ["branches.0.weight", "branches.2.weight"]
        assert_that(named == wanted, f"named are {named} after {head!r}", rank)


@chapter.must(
    "ddp/unused/ignored-are-not-missed",
    "Ignored parameters may go unused without an error.",
    source="torch 2.13, test_ddp_multiple_nested_unused_params_err_ignore_params",
    rests_on="ddp/unused/error-without-search",
)
@world_sizes(2)
def test_ignored_parameters_may_go_unused(ranks: Ranks) -> None:
    said = ranks.run(step_twice, [1], ["branches.0.weight", "branches.2.weight"], False)
    assert_same_on_all_ranks(said, [""], what="error")


@chapter.should(
    "ddp/unused/error-again",
    "The error about an unfinished reduction is raised again at each further forward.",
    source="observed, torch 2.13.0: the reduction stays unfinished",
    rests_on="ddp/unused/error-without-search",
)
@world_sizes(2)
def test_the_error_comes_again(ranks: Ranks) -> None:
    for rank, said in enumerate(ranks.run(step_twice, [1], [], False, True)):
        for i, words in enumerate(said):
            raised = "Expected to have finished reduction" in words
            assert_that(raised, f"forward {i + 2} said {words!r}", rank)


class Leaking(nn.Module):
    """Returns a layer, which the loss then uses behind the back of the search."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Any:
        return self.layers[0](x), self.layers[1]


def use_it_later(me: Me) -> None:
    model = me.ddp(Leaking().to(me.device), find_unused_parameters=True)
    x, layer = model(torch.ones(1, WIDTH, device=me.device))
    layer(x).sum().backward()


@chapter.must(
    "ddp/unused/ready-twice",
    "A parameter that the search took for unused but that the loss uses makes backward raise "
    "RuntimeError 'Expected to mark a variable ready only once', with its index.",
    source=f"{REDUCER}, check_finalized and mark_variable_ready",
)
@world_sizes(1, 2)
def test_a_parameter_that_is_ready_twice(ranks: Ranks) -> None:
    outcomes = ranks.outcomes(use_it_later)
    words = r"(?s)Expected to mark a variable ready only once.*Parameter at index 1"
    assert_raised(outcomes, RuntimeError, match=words)

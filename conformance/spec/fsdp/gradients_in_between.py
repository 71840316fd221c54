"""FSDP and gradients that a program reads or replaces between the passes of steps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import Tensor, nn
from torch.distributed.fsdp import ShardingStrategy

from conformance import Chapter, Me, Ranks, assert_that, world_sizes
from conformance.spec.fsdp.custom import inputs
from conformance.spec.fsdp.small_models import two_layers
from conformance.spec.fsdp.training_runs import STRATEGIES, wrap

chapter = Chapter("fsdp", source="torch 2.13 docs, FullyShardedDataParallel, use_orig_params")


def after_one_pass(me: Me, strategy: str) -> nn.Module:
    """A model with the gradients of one pass."""
    model: nn.Module = two_layers(
        lambda module: wrap(
            me, module, use_orig_params=True, sharding_strategy=ShardingStrategy[strategy]
        )
    )
    run(me, model).backward()
    return model


def run(me: Me, model: nn.Module) -> Tensor:
    loss: Tensor = model(inputs(me.rank, 0).to(me.device)).pow(2).sum()
    return loss


def gradients(model: nn.Module) -> list[Tensor]:
    """Of the parts that this rank holds."""
    return [p.grad.clone() for p in model.parameters() if p.grad is not None and p.grad.numel()]


def multiples(model: nn.Module, of: list[Tensor]) -> list[float]:
    """How often the gradients are those, one by one; rounded."""
    now = gradients(model)
    assert len(now) == len(of), f"gradients of {len(now)} parameters, not of {len(of)}"
    return [round((x / y).mean().item(), 6) for x, y in zip(now, of, strict=True)]


def seen_after_forward(me: Me, strategy: str) -> list[list[float]]:
    """After a second forward, and after its backward."""
    model = after_one_pass(me, strategy)
    of_first = gradients(model)
    loss = run(me, model)
    seen = multiples(model, of_first)
    loss.backward()
    return [seen, multiples(model, of_first)]


@chapter.must(
    "fsdp/gradients-after-forward",
    "With use_orig_params=True and a strategy that keeps no parameters between forward and "
    "backward, or shards none, the gradients of an earlier backward can be read after the next "
    "forward as before it, and its backward adds to them.",
    rests_on="fsdp/original-parameters",
)
@world_sizes(2)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_gradients_are_there_after_a_forward(ranks: Ranks, strategy: str) -> None:
    check_multiples(ranks, seen_after_forward, strategy, [1.0, 2.0])


def after_replacing(me: Me, strategy: str) -> list[list[float]]:
    """After another pass, before which each gradient is replaced by its threefold."""
    model = after_one_pass(me, strategy)
    of_first = gradients(model)
    for param in model.parameters():
        if param.grad is not None:
            param.grad = 3 * param.grad
    run(me, model).backward()
    return [multiples(model, of_first)]


@chapter.must(
    "fsdp/replaced-gradients",
    "With use_orig_params=True, a tensor that a program puts in the place of a gradient is what "
    "the next backward adds to.",
    rests_on="fsdp/original-parameters",
)
@world_sizes(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_gradient_that_was_replaced(ranks: Ranks, strategy: str) -> None:
    check_multiples(ranks, after_replacing, strategy, [4.0])


def check_multiples(
    ranks: Ranks, seen: Callable[..., list[list[float]]], strategy: str, want: list[float]
) -> None:
    for rank, moments in enumerate(ranks.run(seen, strategy)):
        for moment, (got, multiple) in enumerate(zip(moments, want, strict=True), 1):
            what = f"at moment {moment}, gradients are {got} times those of one pass"
            assert_that(set(got) == {multiple}, f"{what}, not {multiple}", rank)

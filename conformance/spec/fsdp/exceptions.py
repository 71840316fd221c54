"""FSDP after exceptions: in no_sync, in summon_full_params, in a backward pass."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn

from conformance import Chapter, Me, Ranks, assert_same_on_all_ranks, world_sizes
from conformance.spec.fsdp.custom import train_custom, train_custom_whole
from conformance.spec.fsdp.small_models import one_pass, three_layers, two_layers, two_layers_from
from conformance.spec.fsdp.training_runs import STRATEGIES, Run, both_kinds, check_runs

chapter = Chapter("fsdp")


def leaving_no_sync(
    model: Any, rank: int, step: int, device: torch.device, scale: float
) -> list[Tensor]:
    with contextlib.suppress(KeyError), model.no_sync():
        raise KeyError
    return one_pass(model, rank, step, device, scale)


@chapter.must(
    "fsdp/no-sync-after-error",
    "When an exception leaves no_sync, the next backward is synchronized.",
    source="torch 2.13, no_sync: it ends in a finally clause",
)
@world_sizes(2)
@both_kinds
def test_an_exception_ends_no_sync(ranks: Ranks, orig: bool) -> None:
    want = train_custom_whole(three_layers, one_pass, ranks.world_size)
    for strategy in STRATEGIES:
        check_runs(ranks.run(train_custom, three_layers, leaving_no_sync, strategy, orig), want)


def leaving_summon(
    model: Any, rank: int, step: int, device: torch.device, scale: float
) -> list[Tensor]:
    with (
        contextlib.suppress(KeyError),
        type(model).summon_full_params(model, writeback=step % 2 == 0),
    ):
        raise KeyError
    return one_pass(model, rank, step, device, scale)


@chapter.must(
    "fsdp/summon-after-error",
    "When an exception leaves summon_full_params, training continues as before.",
    source="torch 2.13, _unshard_params: it ends in finally clauses",
)
@world_sizes(2)
@both_kinds
def test_an_exception_ends_summon(ranks: Ranks, orig: bool) -> None:
    want = train_custom_whole(two_layers, one_pass, ranks.world_size)
    for strategy in STRATEGIES:
        check_runs(ranks.run(train_custom, two_layers, leaving_summon, strategy, orig), want)


class Refused(torch.autograd.Function):
    """Raises in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise KeyError("not today")


class Moody(nn.Linear):
    """A layer whose backward may refuse to run."""

    refuses = False

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        if self.refuses:
            out = Refused.apply(out)  # type: ignore[no-untyped-call]  # in torch
        return out


def refuse_backward(me: Me, strategy: str, orig: bool) -> tuple[list[int], Run]:
    """A backward that raises in an inner unit before each step of training."""
    moody = Moody(3, 3)
    keys = []

    def passes(
        model: Any, rank: int, step: int, device: torch.device, scale: float
    ) -> list[Tensor]:
        moody.refuses = True
        with contextlib.suppress(KeyError):
            one_pass(model, rank, step, device, scale)
        moody.refuses = False
        keys.append(len(model.state_dict()))
        model.zero_grad()
        return one_pass(model, rank, step, device, scale)

    run = train_custom(me, two_layers_from(moody), passes, strategy, orig)
    return keys, run


@chapter.must(
    "fsdp/backward-that-raises",
    "After a backward that raised, the model can be saved and, once its gradients are cleared, "
    "trained as before.",
    source="derived; torch 2.13 stays in the backward",
)
@world_sizes(2)
@both_kinds
def test_a_backward_that_raises(ranks: Ranks, orig: bool) -> None:
    want = train_custom_whole(two_layers, one_pass, ranks.world_size)
    for strategy in STRATEGIES:
        got = ranks.run(refuse_backward, strategy, orig)
        counts = [keys for keys, _ in got]
        assert_same_on_all_ranks(counts, [4] * 3, what="entries of state dicts")
        check_runs([run for _, run in got], want)

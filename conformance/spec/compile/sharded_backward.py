"""Backward passes of sharded models under compiled autograd: right, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from conformance import Chapter, Me, Ranks, not_probed, world_sizes
from conformance.oracle.data import seeded_generator
from conformance.spec.compile.facts import compiled, compiler
from conformance.spec.facts import check_fact, near, rows
from conformance.spec.wrappers import fsdp_of

NEEDS = (
    *("feature:compiled_calls", "op:all_gather_into_tensor", "op:reduce_scatter_tensor"),
    *("dtype:float64", "reduce_op:sum"),
)

chapter = Chapter("compile", source="torch 2.13 docs, tutorial: Compiled Autograd", needs=NEEDS)

WIDTH = 4
RIGHT_OR_REFUSED = (
    "under compiled autograd gives the gradients of one process, or is refused with an error."
)


def layers(device: torch.device) -> nn.Sequential:
    with seeded_generator(1):
        parts = (nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        return nn.Sequential(*parts).double().to(device)


def loss_of(model: Any, rank: int, device: torch.device) -> Any:
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(2, WIDTH, generator=generator, dtype=torch.float64)
    return model(x.to(device)).square().sum()


def next_loss(me: Me, wrap: Callable[[Me, nn.Module], Any]) -> list[str]:
    """What is wrong with the loss after a step with gradients that such a backward gave."""
    alone, model = layers(me.device), wrap(me, layers(me.device))
    for rank in range(me.world_size):
        (loss_of(alone, rank, me.device) / me.world_size).backward()
    loss = loss_of(model, me.rank, me.device)
    with compiler(compiled_autograd=True):
        try:
            compiled(Tensor.backward, "eager")(loss)
        except Exception:
            return []
    for module in (alone, model):
        torch.optim.SGD(module.parameters(), lr=0.1).step()
    got, want = (loss_of(m, me.rank, me.device) for m in (model, alone))
    got.backward()  # an ordinary one: nothing is left of the compiled one
    return near("loss after a step", got, want, 1e-9)


def in_fsdp(me: Me, module: nn.Module) -> Any:
    return fsdp_of(me)(module, device_id=me.device, use_orig_params=True)


def fully_sharded(me: Me, module: nn.Module) -> Any:
    return me.fully_shard(module)


@world_sizes(2)
@not_probed()
@pytest.mark.parametrize(
    "wrap",
    rows(
        (
            chapter.must(
                "compile/fsdp/compiled-autograd", f"A backward of FSDP {RIGHT_OR_REFUSED}"
            ),
            in_fsdp,
        ),
        (
            chapter.must(
                "compile/fully_shard/compiled-autograd",
                f"A backward of fully_shard {RIGHT_OR_REFUSED}",
            ),
            fully_sharded,
        ),
    ),
)
def test_backward(ranks: Ranks, wrap: Any) -> None:
    check_fact(ranks, next_loss, wrap)

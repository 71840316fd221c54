"""FSDP of parameters that are not laid out row by row: in another memory format, or with gaps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from conformance import Chapter, Me, Ranks, assert_same_on_all_ranks, world_sizes
from conformance.oracle.data import seeded_generator
from conformance.spec.fsdp.custom import Unit, check_custom, inputs, linear
from conformance.spec.fsdp.small_models import one_pass
from conformance.spec.fsdp.training_runs import both_kinds, wrap

chapter = Chapter("fsdp", source="torch 2.13, FlatParamHandle, contiguous and strides")


def channels_last(unit: Unit) -> Any:
    """A convolution whose weight is laid out in another order."""
    with seeded_generator(4):
        module = nn.Conv2d(3, 4, 2).double()
    module.weight.data = module.weight.data.contiguous(memory_format=torch.channels_last)
    return unit(nn.Sequential(module))


def one_image(model: Any, rank: int, step: int, device: torch.device, scale: float) -> list[Tensor]:
    x = inputs(rank, step, width=48).view(2, 3, 4, 4).to(device)
    loss = model(x).pow(2).sum()
    (scale * loss).backward()
    return [loss]


@chapter.must(
    "fsdp/channels-last",
    "Parameters in another memory format train like the bare module's.",
)
@world_sizes(2, 3)
@both_kinds
def test_channels_last_weights(ranks: Ranks, orig: bool) -> None:
    check_custom(ranks, channels_last, one_image, orig=orig)


class SeesStrides(nn.Conv2d):
    """Notes the strides of its weight in each forward."""

    seen: list[tuple[int, ...]]

    def forward(self, input: Tensor) -> Tensor:
        self.seen.append(self.weight.stride())
        return super().forward(input)


def strides_in_forward(me: Me, orig: bool) -> list[tuple[int, ...]]:
    module = SeesStrides(3, 4, 2).double()
    module.weight.data = module.weight.data.contiguous(memory_format=torch.channels_last)
    module.seen = []
    model = wrap(me, nn.Sequential(module), use_orig_params=orig)
    for step in range(2):
        one_image(model, me.rank, step, me.device, 1.0)
    return module.seen


@chapter.must(
    "fsdp/memory-format-kept",
    "In forward, a parameter has the strides that it had when it was wrapped, so that layers of "
    "channels-last weights compute in that format.",
    rests_on="fsdp/channels-last",
)
@world_sizes(2)
@both_kinds
def test_strides_in_forward(ranks: Ranks, orig: bool) -> None:
    weight = torch.empty(4, 3, 2, 2).to(memory_format=torch.channels_last)
    want = [weight.stride()] * 2
    assert_same_on_all_ranks(ranks.run(strides_in_forward, orig), want, what="strides in forward")


def with_gaps(unit: Unit) -> Any:
    """A layer whose weight is every other column of a matrix, and a layer after it."""
    first, last = linear(3, 3, 1), linear(3, 2, 2)
    wide = torch.zeros(3, 6, dtype=torch.float64)
    wide[:, ::2] = first.weight.detach()
    first.weight = nn.Parameter(wide[:, ::2])
    return unit(nn.Sequential(first, last))


@chapter.should(
    "fsdp/parameters-with-gaps",
    "A parameter that is a slice with gaps in memory, such as every other column of a matrix, "
    "trains like the bare module's.",
    rests_on="fsdp/channels-last",
)
@world_sizes(2)
@both_kinds
def test_a_parameter_with_gaps(ranks: Ranks, orig: bool) -> None:
    check_custom(ranks, with_gaps, one_pass, orig=orig)

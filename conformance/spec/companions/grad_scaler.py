"""ShardedGradScaler: ranks have parts of the gradients, and scale, skip and grow alike."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from conformance import Chapter, Me, Ranks, world_sizes
from conformance.spec.companions.facts import refusal
from conformance.spec.facts import Fact, check_fact, rows, unlike

chapter = Chapter(
    "companions",
    source="torch 2.13, torch.distributed.fsdp.sharded_grad_scaler",
    needs=("op:all_reduce", "reduce_op:sum", "device:unscaling"),
)

SCALE, BACKOFF, GROWTH = 64.0, 0.25, 4.0
INFINITY, NAN = float("inf"), float("nan")


def scaler_of(me: Me, **settings: Any) -> Any:
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler  # takes a while

    given = {"backoff_factor": BACKOFF, "growth_factor": GROWTH, "growth_interval": 2, **settings}
    return ShardedGradScaler(me.device.type, init_scale=SCALE, **given)


class Shard:
    """One parameter of this rank with an optimizer that subtracts its gradient."""

    def __init__(self, me: Me, size: int = 2) -> None:
        self.param = nn.Parameter(torch.zeros(size, device=me.device))
        self.optimizer = torch.optim.SGD([self.param], lr=1.0)

    def step(self, scaler: Any, gradient: float) -> None:
        """Scale a loss whose gradient this is, and step."""
        self.optimizer.zero_grad()
        scaler.scale((self.param * gradient).sum()).backward()
        scaler.step(self.optimizer)

    @property
    def total(self) -> float:
        return float(self.param.detach().sum())


def scaled(me: Me) -> list[str]:
    scaler = scaler_of(me)
    half = torch.full((2,), 1.5, dtype=torch.bfloat16, device=me.device)
    one = torch.ones(1, device=me.device)
    pair = scaler.scale([one, (half, one * 2)])
    seen = [scaler.scale(half).dtype, scaler.scale(half).tolist(), pair[0].item()]
    seen += [type(pair[1]).__name__, pair[1][1].item(), scaler.get_scale()]
    want = [torch.bfloat16, [1.5 * SCALE] * 2, SCALE, "tuple", 2 * SCALE, SCALE]
    return unlike("scaled", seen, want)


def unscaled(me: Me) -> list[str]:
    scaler, shard = scaler_of(me), Shard(me)
    scaler.scale((shard.param * 3).sum()).backward()
    assert shard.param.grad is not None
    before = shard.param.grad.tolist()
    scaler.unscale_(shard.optimizer)
    found = unlike("gradients", [before, shard.param.grad.tolist()], [[3 * SCALE] * 2, [3.0] * 2])
    scaler.step(shard.optimizer)
    return found + unlike("parameter", shard.param.tolist(), [-3.0] * 2)


def one_rank_overflows(me: Me) -> list[str]:
    """Each rank in turn, by an infinity and by a NaN."""
    found = []
    for spoilt in range(me.world_size):
        for value in (INFINITY, NAN):
            scaler, shard = scaler_of(me), Shard(me)
            shard.step(scaler, value if me.rank == spoilt else 1.0)
            scaler.update()
            seen = shard.total, scaler.get_scale()
            what = f"rank {spoilt} has {value}: parameter, scale"
            found += unlike(what, seen, (0.0, SCALE * BACKOFF))
    return found


def all_ranks_overflow(me: Me) -> list[str]:
    scaler, shard = scaler_of(me), Shard(me)
    for _ in range(2):
        shard.step(scaler, INFINITY)
        scaler.update()
    shard.step(scaler, 1.0)
    scaler.update()
    seen = shard.total, scaler.get_scale()
    return unlike("parameter, scale", seen, (-2.0, SCALE * BACKOFF**2))


def grows(me: Me) -> list[str]:
    """After two steps in a row without an overflow on any rank."""
    scaler, shard, scales = scaler_of(me), Shard(me), []
    for step in range(6):
        shard.step(scaler, INFINITY if step == 1 and me.rank == 0 else 1.0)
        scaler.update()
        scales.append(scaler.get_scale())
    low = SCALE * BACKOFF
    return unlike("scales", scales, [SCALE, low, low, low * GROWTH, low * GROWTH, SCALE * GROWTH])


def two_optimizers(me: Me) -> list[str]:
    """The one with an overflow skips its step; the scale is the same for both."""
    scaler, sound, spoilt = scaler_of(me), Shard(me), Shard(me)
    sound.step(scaler, 1.0)
    spoilt.step(scaler, INFINITY if me.rank == 1 else 1.0)
    scaler.update()
    seen = sound.total, spoilt.total, scaler.get_scale()
    return unlike("parameters, scale", seen, (-2.0, 0.0, SCALE * BACKOFF))


def without_gradients(me: Me) -> list[str]:
    """Rank 0 has an empty shard, the last rank a parameter that was not used."""
    scaler, found = scaler_of(me), []
    for spoilt in (False, True):
        shard = Shard(me, size=0 if me.rank == 0 else 2)
        if me.rank == me.world_size - 1:
            scaler.scale(torch.ones(1, device=me.device))
        else:
            value = INFINITY if spoilt and me.rank == 1 else 1.0
            scaler.scale((shard.param * value).sum()).backward()
        scaler.step(shard.optimizer)
        scaler.update()
        want = 0.0 if spoilt or me.rank != 1 else -2.0
        found += unlike(f"parameter, {spoilt=}", shard.total, want)
    return found + unlike("scale", scaler.get_scale(), SCALE * BACKOFF)


def subgroup(me: Me) -> list[str]:
    """An overflow in one group is none of the other's."""
    group, rest = dist.new_group([0, 2]), dist.new_group([1])
    shard = Shard(me)
    scaler = scaler_of(me, process_group=rest if me.rank == 1 else group)
    shard.step(scaler, INFINITY if me.rank == 2 else 1.0)
    scaler.update()
    want = (-2.0, SCALE) if me.rank == 1 else (0.0, SCALE * BACKOFF)
    return unlike("parameter, scale", (shard.total, scaler.get_scale()), want)


def out_of_order(me: Me) -> list[str]:
    scaler, shard = scaler_of(me), Shard(me)
    scaler.scale((shard.param * 3).sum()).backward()
    scaler.unscale_(shard.optimizer)
    said = [refusal(lambda: scaler.unscale_(shard.optimizer), RuntimeError)]
    scaler.step(shard.optimizer)
    said += [
        refusal(lambda: scaler.unscale_(shard.optimizer), RuntimeError),
        refusal(lambda: scaler.step(shard.optimizer), RuntimeError),
    ]
    names = ("unscaled twice", "unscaled after its step", "two steps")
    return [f"{n}: {text}" for n, text in zip(names, said, strict=True) if text.startswith("(")]


def disabled(me: Me) -> list[str]:
    scaler, shard = scaler_of(me, enabled=False), Shard(me)
    shard.step(scaler, 3.0)
    scaler.update()
    seen = shard.total, scaler.get_scale(), scaler.is_enabled(), scaler.state_dict()
    return unlike("parameter, scale, enabled, state", seen, (-6.0, 1.0, False, {}))


def state(me: Me) -> list[str]:
    scaler, shard = scaler_of(me), Shard(me)
    shard.step(scaler, INFINITY if me.rank == 0 else 1.0)
    scaler.update()
    shard.step(scaler, 1.0)
    scaler.update()
    resumed, other = scaler_of(me, growth_interval=77), Shard(me)
    resumed.load_state_dict(copy.deepcopy(scaler.state_dict()))
    found = unlike("scale", resumed.get_scale(), SCALE * BACKOFF)
    other.step(resumed, 1.0)
    resumed.update()
    return found + unlike("scale one step later", resumed.get_scale(), SCALE * BACKOFF * GROWTH)


def new_scale(me: Me) -> list[str]:
    scaler, shard = scaler_of(me), Shard(me)
    seen = []
    for scale in (8.0, torch.tensor(2.0, device=me.device)):
        shard.step(scaler, 1.0)
        scaler.update(scale)
        seen.append(scaler.get_scale())
    return unlike("scales", seen, [8.0, 2.0])


@world_sizes(3)
@pytest.mark.parametrize(
    "fact",
    rows(
        (
            chapter.must(
                "grad_scaler/scale",
                "scale multiplies a tensor, or each one in nested lists and tuples, and keeps its "
                "dtype.",
            ),
            scaled,
        ),
        (
            chapter.must(
                "grad_scaler/unscale",
                "unscale_ divides gradients by the scale once, and step uses them.",
            ),
            unscaled,
        ),
        (
            chapter.must(
                "grad_scaler/any-rank",
                "An infinity or a NaN in the gradients of any one rank has all ranks skip the step "
                "and lower the scale.",
                rests_on="grad_scaler/unscale",
            ),
            one_rank_overflows,
        ),
        (
            chapter.must(
                "grad_scaler/all-ranks",
                "An overflow on all ranks lowers the scale once.",
                rests_on="grad_scaler/unscale",
            ),
            all_ranks_overflow,
        ),
        (
            chapter.must(
                "grad_scaler/grows",
                "After growth_interval steps in a row without an overflow on any rank, all ranks "
                "raise the scale.",
                rests_on="grad_scaler/any-rank",
            ),
            grows,
        ),
        (
            chapter.must(
                "grad_scaler/two-optimizers",
                "Of two optimizers, the one with an overflow skips its step, and the scale is "
                "lowered.",
                rests_on="grad_scaler/any-rank",
            ),
            two_optimizers,
        ),
        (
            chapter.must(
                "grad_scaler/without-gradients",
                "Ranks with an empty shard or without gradients take part, and skip what others "
                "skip.",
                rests_on="grad_scaler/any-rank",
            ),
            without_gradients,
        ),
        (
            chapter.must(
                "grad_scaler/subgroup",
                "With a process_group, only its ranks skip a step together.",
                rests_on="grad_scaler/any-rank",
            ),
            subgroup,
        ),
        (
            chapter.must(
                "grad_scaler/out-of-order",
                "unscale_ after unscale_ or step, and a second step before update, are a "
                "RuntimeError.",
            ),
            out_of_order,
        ),
        (
            chapter.must("grad_scaler/disabled", "A scaler that is not enabled changes nothing."),
            disabled,
        ),
        (
            chapter.must(
                "grad_scaler/state",
                "A scaler that is resumed from a state has its scale, its factors and its count.",
                rests_on="grad_scaler/grows",
            ),
            state,
        ),
        (chapter.must("grad_scaler/new-scale", "update sets a scale that it is given."), new_scale),
    ),
)
def test_grad_scaler(ranks: Ranks, fact: Fact) -> None:
    check_fact(ranks, fact)

"""Dtypes of odd parameters and outputs, divisors in float32, replicas, empty and partial shards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

from conformance import Chapter, Me, Ranks, world_sizes
from conformance.spec.facts import Fact, check_fact, rows, unlike
from conformance.spec.fully_shard.companions import register_forward_method
from conformance.spec.fully_shard.layers_of_ones import (
    WIDTH,
    batch,
    ones,
    shard_of,
    unlike_gradient,
)
from conformance.spec.fully_shard.recipes import local, mesh_of, shards_of
from conformance.spec.fully_shard.versions import needs_method

NEEDS = (
    *("op:all_gather_into_tensor", "op:reduce_scatter_tensor"),
    *("dtype:float32", "reduce_op:avg"),
)
LOW = "dtype:bfloat16"
REPLICAS = ("op:all_reduce", "reduce_op:sum")

chapter = Chapter("fully_shard", source="torch 2.13 docs, fully_shard", needs=NEEDS)

# Dtypes


class Featured(nn.Module):
    """Has a second method that counts as a forward."""

    def __init__(self, me: Me) -> None:
        super().__init__()
        self.layer = ones(me)

    def features(self, x: Tensor, *, other: Tensor) -> Tensor:
        result: Tensor = self.layer(x) + self.layer(other)
        return result


def method_casts(me: Me) -> list[str]:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model = shard_of(me, Featured(me), mp_policy=policy)
    register_forward_method(me, model, "features")
    output = model.features(batch(me), other=batch(me))
    return unlike("dtype of the result", str(output.dtype), str(torch.bfloat16))


class InADictionary(nn.Module):
    def __init__(self, me: Me) -> None:
        super().__init__()
        self.layer = ones(me)

    def forward(self, x: Tensor) -> dict[str, list[Tensor]]:
        return {"out": [self.layer(x)]}


def evaluated_outputs(me: Me) -> list[str]:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    model = shard_of(me, InADictionary(me), mp_policy=policy)
    dtypes = [str(model(batch(me))["out"][0].dtype)]
    with torch.no_grad():
        dtypes.append(str(model(batch(me))["out"][0].dtype))
    return unlike("outputs in training and evaluation", dtypes, [str(torch.float32)] * 2)


class Indexed(nn.Module):
    """Has a parameter of integers."""

    def __init__(self, me: Me) -> None:
        super().__init__()
        self.layer = ones(me)
        numbers = torch.arange(300, 304, device=me.device)
        self.index = nn.Parameter(numbers, requires_grad=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer(x), self.index + 0


def integer_parameter(me: Me) -> list[str]:
    found = []
    for dtype in (None, torch.bfloat16):
        policy = MixedPrecisionPolicy(param_dtype=dtype)
        model = shard_of(me, Indexed(me), mp_policy=policy)
        output, index = model(batch(me))
        output.sum().backward()
        found += unlike(f"numbers under {dtype}", index.cpu(), torch.arange(300, 304))
    return found


class Recomputed(nn.Module):
    def __init__(self, me: Me) -> None:
        super().__init__()
        self.layer = ones(me)

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.layer, x, use_reentrant=False)


def recomputation_casts(me: Me) -> list[str]:
    model = Recomputed(me)
    shard_of(me, model.layer, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    shard_of(me, model)
    model(batch(me).requires_grad_()).sum().backward()
    return unlike_gradient("the layer", model.layer, 1.0)


class PartlyFrozen(nn.Module):
    def __init__(self, me: Me) -> None:
        super().__init__()
        self.frozen = ones(me, dtype=torch.bfloat16).requires_grad_(False)
        self.head = ones(me)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.frozen(x.bfloat16()).float())
        return result


def frozen_of_another_dtype(me: Me) -> list[str]:
    model = shard_of(me, PartlyFrozen(me))
    model(batch(me)).sum().backward()
    return unlike_gradient("the trained layer", model.head, float(WIDTH))


DTYPES = rows(
    (
        chapter.must(
            "fully_shard/forward-method-casts",
            "A method that register_fsdp_forward_method has named gets its inputs in the "
            "param_dtype, keywords too.",
            needs=LOW,
            source="torch 2.13 docs, register_fsdp_forward_method",
            rests_on="fully_shard/forward-method",
        ),
        method_casts,
    ),
    (
        chapter.must(
            "fully_shard/output-dtype-everywhere",
            "The output_dtype is that of outputs in dictionaries and lists, and of outputs of an "
            "evaluation.",
            needs=LOW,
            source="torch 2.13 docs, MixedPrecisionPolicy",
            rests_on="fully_shard/output-dtype",
        ),
        evaluated_outputs,
    ),
    (
        chapter.must(
            "fully_shard/integer-parameter",
            "A parameter of integers keeps values and dtype, under a policy too.",
            needs=LOW,
            source="torch 2.13, FSDPParam.init_dtype_attrs",
        ),
        integer_parameter,
    ),
    (
        chapter.must(
            "fully_shard/recomputation-casts",
            "A unit that a checkpoint recomputes casts its inputs as its forward did.",
            source="torch 2.13 docs, MixedPrecisionPolicy",
            needs=(LOW, "device:autocast"),
            rests_on="fully_shard/checkpoint-around",
        ),
        recomputation_casts,
    ),
    (
        chapter.must(
            "fully_shard/frozen-of-another-dtype",
            "The frozen parameters of a unit may be of another dtype than those that it trains.",
            needs=LOW,
            source="torch 2.13, FSDPParamGroup._init_mp_dtypes",
        ),
        frozen_of_another_dtype,
    ),
)


@world_sizes(2)
@pytest.mark.parametrize("fact", DTYPES)
def test_dtypes(ranks: Ranks, fact: Fact) -> None:
    check_fact(ranks, fact)


def near_the_largest(me: Me) -> list[str]:
    policy = MixedPrecisionPolicy(param_dtype=torch.float16, output_dtype=torch.float32)
    model = shard_of(me, ones(me), mp_policy=policy)
    model(batch(me, 1000.0)).sum().mul(40.0).backward()
    return unlike_gradient("the layer", model, 40000.0)


@chapter.must(
    "fully_shard/range-of-float16",
    "Where ranks' gradients in float16 add up to more than its range, their mean is right.",
    source="torch 2.13, _get_gradient_divide_factors",
    needs="dtype:float16",
)
@world_sizes(2)
def test_gradients_near_the_largest_number(ranks: Ranks) -> None:
    check_fact(ranks, near_the_largest)


# Replicas, resets and shards


def divided(me: Me, replicas: int, factor: float, only_sums: bool) -> list[str]:
    model = me.fully_shard(ones(me), mesh=mesh_of(me, replicas))
    model.set_gradient_divide_factor(factor)
    if only_sums:
        model.set_force_sum_reduction_for_comms(True)
    model(batch(me)).sum().backward()
    return unlike_gradient("the layer", model, me.world_size / factor)


@chapter.must(
    "fully_shard/divide-factor-in-float32",
    "set_gradient_divide_factor sets by what the sum over all ranks is divided in float32 too, "
    "over replicas, replicas of single ranks, and with set_force_sum_reduction_for_comms.",
    source="torch 2.13, _get_gradient_divide_factors",
    needs=REPLICAS,
    rests_on="fully_shard/divide-factor",
)
@world_sizes(4)
@needs_method("set_force_sum_reduction_for_comms")
@pytest.mark.parametrize(
    ("replicas", "factor", "only_sums"),
    [(2, 2.0, False), (4, 8.0, False), (2, 8.0, True), (1, 8.0, True)],
)
def test_divide_factors(ranks: Ranks, replicas: int, factor: float, only_sums: bool) -> None:
    check_fact(ranks, divided, replicas, factor, only_sums)


def reset_of_a_part(me: Me) -> list[str]:
    model = me.fully_shard(ones(me), mesh=mesh_of(me, me.world_size))
    model.set_requires_all_reduce(False)
    model(batch(me)).sum().backward()
    model.reset_iter_state()
    model.set_requires_all_reduce(True)
    model(batch(me)).sum().backward()
    return unlike_gradient("the layer", model, 1.0)


@chapter.must(
    "fully_shard/reset-between-replicas",
    "reset_iter_state drops gradients that were scattered and not all-reduced.",
    source="torch 2.13 docs, FSDPModule, reset_iter_state",
    needs=REPLICAS,
)
@world_sizes(2)
@needs_method("reset_iter_state")
def test_a_reset_between_replicas(ranks: Ranks) -> None:
    check_fact(ranks, reset_of_a_part)


def synchronized_again(me: Me) -> list[str]:
    model = me.fully_shard(ones(me), mesh=mesh_of(me, me.world_size))
    model.set_requires_all_reduce(False)
    model.set_requires_gradient_sync(True)
    model(batch(me, 1.0 + me.rank)).sum().backward()
    return unlike_gradient("the layer", model, (1 + me.world_size) / 2)


@chapter.must(
    "fully_shard/sync-includes-replicas",
    "set_requires_gradient_sync(True) has gradients scattered and all-reduced, also after "
    "set_requires_all_reduce(False).",
    source="torch 2.13 docs, FSDPModule, set_requires_gradient_sync",
    needs=REPLICAS,
)
@world_sizes(2)
def test_synchronized_again(ranks: Ranks) -> None:
    check_fact(ranks, synchronized_again)


def materialized(me: Me) -> list[str]:
    """Of one row, so that all ranks but the first have an empty shard."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(WIDTH, 1), nn.Linear(1, 1))
    for layer in model:
        shard_of(me, layer)
    shard_of(me, model)
    model.to_empty(device=me.device)
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.5)
    output = model(batch(me))
    output.sum().backward()
    return unlike("output", output.item(), 0.5 * (WIDTH * 0.5 + 0.5) + 0.5)


@chapter.must(
    "fully_shard/empty-shards-from-meta",
    "A model on the meta device can be sharded and given memory where ranks have empty shards.",
    source="torch 2.13 docs, fully_shard, meta device",
)
@world_sizes(3)
def test_memory_for_empty_shards(ranks: Ranks) -> None:
    check_fact(ranks, materialized)


def partly_sharded(me: Me) -> tuple[Any, list[tuple[int, ...]]]:
    """A model that keeps parts of two ranks after a forward; and the shapes of its shards."""
    model = shard_of(me, ones(me, outputs=2 * me.world_size), reshard_after_forward=2)
    shapes = [tuple(shard.shape) for shard in shards_of(model).values()]
    model(batch(me))
    return model, shapes


def saved_when_partly_sharded(me: Me) -> list[str]:
    model, shapes = partly_sharded(me)
    got = [tuple(local(tensor).shape) for tensor in model.state_dict().values()]
    return unlike("shapes in the state dict", got, shapes)


def fully_sharded_by_hand(me: Me) -> list[str]:
    model, shapes = partly_sharded(me)
    model.reshard()
    return unlike("shapes", [tuple(s.shape) for s in shards_of(model).values()], shapes)


PARTLY_SHARDED = rows(
    (
        chapter.must(
            "fully_shard/saved-when-partly-sharded",
            "A state dict that is taken after a forward has full shards, also where the forward "
            "keeps the parts of fewer ranks.",
            source="torch 2.13, FSDPState, state_dict hooks",
        ),
        saved_when_partly_sharded,
    ),
    (
        chapter.must(
            "fully_shard/reshard-when-partly-sharded",
            "reshard() brings full shards back where a forward keeps the parts of fewer ranks.",
            source="torch 2.13 docs, FSDPModule, reshard",
        ),
        fully_sharded_by_hand,
    ),
)


@world_sizes(4)
@pytest.mark.parametrize("fact", PARTLY_SHARDED)
def test_partly_sharded(ranks: Ranks, fact: Fact) -> None:
    check_fact(ranks, fact)

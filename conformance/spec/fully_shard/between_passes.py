"""What lies between the passes of a step: layers left out, hooks, evaluation, changed settings."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from conformance import Chapter, Me, Ranks, world_sizes
from conformance.spec.facts import Fact, check_fact, rows, unlike
from conformance.spec.fully_shard.companions import register_forward_method
from conformance.spec.fully_shard.recipes import local, mesh_of, shards_of
from conformance.spec.fully_shard.versions import needs_method

COLLECTIVES = ("op:all_gather_into_tensor", "op:reduce_scatter_tensor")
NEEDS = (*COLLECTIVES, "dtype:float32", "reduce_op:avg")
LOW = "dtype:bfloat16"
REPLICAS = ("op:all_reduce", "reduce_op:sum")

chapter = Chapter("fully_shard", source="torch 2.13 docs, fully_shard", needs=NEEDS)

WIDTH = 3


class Branches(nn.Module):
    """Layers whose weights are ones; a forward says which of them it calls."""

    def __init__(self, me: Me) -> None:
        super().__init__()
        self.a, self.b, self.c = (ones(me) for _ in range(3))

    def forward(self, x: Tensor, *calls: str) -> tuple[Tensor, Tensor]:
        """Through these layers in a row; and what layer b makes of `x`, if none are named."""
        if not calls:
            return self.a(x), self.b(x)
        for name in calls:
            x = getattr(self, name)(x)
        return x, x


def ones(me: Me, inputs: int = WIDTH, outputs: int = WIDTH, dtype: Any = None) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias=False, device=me.device, dtype=dtype)
    nn.init.ones_(layer.weight)
    return layer


def batch(me: Me, factor: float = 1.0) -> Tensor:
    """(1, WIDTH), the same on all ranks."""
    return torch.full((1, WIDTH), factor, device=me.device)


def branches(me: Me, **kwargs: Any) -> Any:
    """Layers and root are units."""
    model = Branches(me)
    for layer in (model.a, model.b, model.c):
        me.fully_shard(layer, mesh=mesh_of(me), **kwargs)
    return me.fully_shard(model, mesh=mesh_of(me), **kwargs)


def shard_of(me: Me, module: nn.Module, **kwargs: Any) -> Any:
    return me.fully_shard(module, mesh=mesh_of(me), **kwargs)


def unlike_gradient(name: str, layer: Any, value: float | None) -> list[str]:
    """Each element of the layer's weight has this gradient; None: there is none."""
    gradient = layer.weight.grad
    if gradient is None or value is None:
        return unlike(f"gradient of {name}", gradient, value)
    mine = local(gradient).cpu()
    return unlike(f"gradient of {name}", mine, torch.full_like(mine, value))


def is_sharded(module: nn.Module) -> list[bool]:
    return [isinstance(parameter, DTensor) for parameter in module.parameters()]


# Layers left out


def uncalled_in_the_last(me: Me) -> list[str]:
    model = branches(me)
    model.set_requires_gradient_sync(False)
    model(batch(me), "a", "b")[0].sum().backward()
    model.set_requires_gradient_sync(True)
    model(batch(me), "a")[0].sum().backward()
    # with a layer of ones behind it, each output of `a` counts WIDTH times
    return unlike_gradient("a", model.a, WIDTH + 1) + unlike_gradient("b", model.b, WIDTH)


def called_for_nothing(me: Me) -> list[str]:
    model = branches(me, reshard_after_forward=False)
    model(batch(me))[0].sum().backward()
    found = unlike("sharded after the backward", is_sharded(model), [True] * 3)
    return found + unlike_gradient("a", model.a, 1.0) + unlike_gradient("b", model.b, None)


def gathered_for_nothing(me: Me) -> list[str]:
    """The second layer is gathered ahead of a backward that it has no part in."""
    model = branches(me)

    def both() -> tuple[Tensor, Tensor]:
        return model.b(batch(me)), model.c(batch(me))

    model.forward = both
    model()[1].sum().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            local_part: Any = parameter
            local_part.to_local().fill_(2.0)
    output = model()[0].detach().cpu()
    return unlike("output of the second forward", output, torch.full_like(output, 2.0 * WIDTH))


LEFT_OUT = rows(
    (
        chapter.must(
            "fully_shard/not-called-in-the-last-backward",
            "A unit whose forward only earlier passes of an accumulation have called gets the mean "
            "of their gradients.",
        ),
        uncalled_in_the_last,
    ),
    (
        chapter.must(
            "fully_shard/not-in-the-loss",
            "A unit whose output has no part in the loss gets no gradient, and is sharded after "
            "the backward.",
        ),
        called_for_nothing,
    ),
    (
        chapter.must(
            "fully_shard/gathered-for-nothing",
            "What was gathered ahead of a backward that did not come is not used later: a forward "
            "computes with the values of that moment.",
            source="torch 2.13, FSDPParamGroup.finalize_backward",
        ),
        gathered_for_nothing,
    ),
)


@world_sizes(2)
@pytest.mark.parametrize("fact", LEFT_OUT)
def test_layers_left_out(ranks: Ranks, fact: Fact) -> None:
    check_fact(ranks, fact)


# Hooks, outputs and passes in between


def hooks_from_before(me: Me) -> list[str]:
    seen: list[list[bool]] = []
    model = Branches(me)
    model.a.register_forward_pre_hook(lambda layer, _: seen.append(is_sharded(layer)))
    model.a.register_forward_hook(lambda layer, *_: seen.append(is_sharded(layer)))
    shard_of(me, model.a)
    shard_of(me, model)
    model(batch(me), "a")
    return unlike("sharded in hooks before and after the forward", seen, [[False], [False]])


def both_hooks(me: Me) -> list[str]:
    model, seen = shard_of(me, ones(me)), list[int]()
    for number in (1, 2):
        model.weight.register_post_accumulate_grad_hook(lambda _, n=number: seen.append(n))
    model(batch(me)).sum().backward()
    return unlike("hooks that have run", seen, [1, 2])


class Nested(nn.Module):
    """A unit of two layers, whose output lies in a list in a dictionary."""

    def __init__(self, me: Me) -> None:
        super().__init__()
        self.a, self.b = ones(me), ones(me)

    def forward(self, x: Tensor) -> dict[str, list[Tensor]]:
        return {"out": [self.b(self.a(x))]}


class Around(nn.Module):
    def __init__(self, me: Me) -> None:
        super().__init__()
        self.inner, self.head = Nested(me), ones(me)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.inner(x)["out"][0])
        return result


def around(me: Me) -> Any:
    model = Around(me)
    shard_of(me, model.inner)
    return shard_of(me, model)


def unlike_around(model: Any, times: float = 1.0) -> list[str]:
    """Gradients of all layers: each counts what comes in and, for each output, what comes after."""
    layers = {"a": model.inner.a, "b": model.inner.b, "head": model.head}
    return [
        text
        for name, layer in layers.items()
        for text in unlike_gradient(name, layer, times * WIDTH**2)
    ]


def nested_output(me: Me) -> list[str]:
    model = around(me)
    model(batch(me).requires_grad_()).sum().backward()
    return unlike_around(model)


def evaluated_between(me: Me) -> list[str]:
    model = around(me)
    loss = model(batch(me).requires_grad_()).sum()
    with torch.no_grad():
        model(batch(me, 5.0))
    loss.backward()
    return unlike_around(model)


def one_gradient(me: Me) -> list[str]:
    model = shard_of(me, ones(me))
    model(batch(me)).sum().backward()
    first = model.weight.grad
    model(batch(me)).sum().backward()
    same = unlike("the same tensor", model.weight.grad is first, True)
    return same + unlike_gradient("the layer", model, 2.0)


def converted_root(me: Me) -> list[str]:
    """When it is whole, after an evaluation."""
    model = shard_of(me, ones(me))
    with torch.no_grad():
        model(batch(me))
    model.double()
    found = unlike("sharded", is_sharded(model), [True])
    return found + unlike("dtype", str(local(model.weight).dtype), str(torch.float64))


def sharded_root(me: Me) -> list[str]:
    model = shard_of(me, ones(me))
    model.set_reshard_after_forward(True)
    model(batch(me))
    return unlike("sharded after the forward", is_sharded(model), [True])


BETWEEN = rows(
    (
        chapter.must(
            "fully_shard/hooks-from-before",
            "Forward hooks that a module had before fully_shard was applied see whole parameters.",
            source="torch 2.13, FSDPState.init",
        ),
        hooks_from_before,
    ),
    (
        chapter.must(
            "fully_shard/several-hooks-of-a-shard",
            "All hooks that a shard has for accumulated gradients run, in order.",
            source="torch 2.13, FSDPParamGroup, post_accumulate_grad hooks",
        ),
        both_hooks,
    ),
    (
        chapter.must(
            "fully_shard/nested-output",
            "A unit whose output lies in a list in a dictionary is gathered for its backward.",
        ),
        nested_output,
    ),
    (
        chapter.must(
            "fully_shard/evaluation-before-the-backward",
            "A forward without gradients between a forward and its backward changes no gradient.",
        ),
        evaluated_between,
    ),
    (
        chapter.must(
            "fully_shard/one-gradient",
            "A second backward adds to the gradient of a shard in place.",
            source="torch docs, Tensor.grad",
        ),
        one_gradient,
    ),
    (
        chapter.must(
            "fully_shard/converted-after-an-evaluation",
            "A root that is whole after an evaluation can be converted to another dtype: its "
            "shards are.",
            source="torch 2.13, FSDPModule._apply",
        ),
        converted_root,
    ),
    (
        chapter.must(
            "fully_shard/sharded-root",
            "After set_reshard_after_forward(True) the root is sharded after a forward, the first "
            "one too.",
            source="torch 2.13 docs, FSDPModule, set_reshard_after_forward",
        ),
        sharded_root,
    ),
)


@world_sizes(2)
@pytest.mark.parametrize("fact", BETWEEN)
def test_between_passes(ranks: Ranks, fact: Fact) -> None:
    check_fact(ranks, fact)


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
def test_dtypes_between(ranks: Ranks, fact: Fact) -> None:
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
    "set_gradient_divide_factor sets by what the sum over all ranks is divided: of float32, over "
    "replicas, replicas of single ranks and plain sums.",
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
    "set_requires_gradient_sync is about scattering and all-reducing: it undoes an earlier "
    "set_requires_all_reduce.",
    source="torch 2.13, FSDPModule.set_requires_gradient_sync",
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

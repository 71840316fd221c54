"""What lies between the passes of a step: layers left out, hooks, evaluation, changed settings."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from conformance import Chapter, Me, Ranks, world_sizes
from conformance.spec.facts import Fact, check_fact, rows, unlike
from conformance.spec.fully_shard.layers_of_ones import (
    WIDTH,
    batch,
    is_sharded,
    ones,
    shard_of,
    unlike_gradient,
)
from conformance.spec.fully_shard.recipes import local

NEEDS = (
    *("op:all_gather_into_tensor", "op:reduce_scatter_tensor"),
    *("dtype:float32", "reduce_op:avg"),
)

chapter = Chapter("fully_shard", source="torch 2.13 docs, fully_shard", needs=NEEDS)


class Layers(nn.Module):
    """Three layers of ones."""

    def __init__(self, me: Me) -> None:
        super().__init__()
        self.a, self.b, self.c = (ones(me) for _ in range(3))


class InARow(Layers):
    """Calls the layers that a forward names, one behind the other."""

    def forward(self, x: Tensor, *names: str) -> Tensor:
        for name in names:
            x = getattr(self, name)(x)
        return x


class SideBySide(Layers):
    """Gives what two layers make of the input."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.a(x), self.b(x)


def units(me: Me, model: Layers, **kwargs: Any) -> Any:
    """The model, of which each layer is a unit, and the root."""
    for layer in (model.a, model.b, model.c):
        shard_of(me, layer, **kwargs)
    return shard_of(me, model, **kwargs)


# Layers left out


def uncalled_in_the_last(me: Me) -> list[str]:
    model = units(me, InARow(me))
    model.set_requires_gradient_sync(False)
    model(batch(me), "a", "b").sum().backward()
    model.set_requires_gradient_sync(True)
    model(batch(me), "a").sum().backward()
    # with a layer of ones behind it, each output of `a` counts WIDTH times
    return unlike_gradient("a", model.a, WIDTH + 1) + unlike_gradient("b", model.b, WIDTH)


def called_for_nothing(me: Me) -> list[str]:
    model = units(me, SideBySide(me), reshard_after_forward=False)
    in_the_loss, _ = model(batch(me))
    in_the_loss.sum().backward()
    found = unlike("sharded after the backward", is_sharded(model), [True] * 3)
    return found + unlike_gradient("a", model.a, 1.0) + unlike_gradient("b", model.b, None)


def gathered_for_nothing(me: Me) -> list[str]:
    """The first layer is gathered ahead of a backward that it has no part in."""
    model = units(me, SideBySide(me))
    _, in_the_loss = model(batch(me))
    in_the_loss.sum().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().fill_(2.0)
    output = model(batch(me))[0].detach().cpu()
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
    model = InARow(me)
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


def unlike_around(model: Any) -> list[str]:
    """Each layer's gradient is its input times what the layers behind it make of one output."""
    layers = {"a": model.inner.a, "b": model.inner.b, "head": model.head}
    return [
        found for name in layers for found in unlike_gradient(name, layers[name], float(WIDTH**2))
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
    model.bfloat16()
    found = unlike("sharded", is_sharded(model), [True])
    return found + unlike("dtype", str(local(model.weight).dtype), str(torch.bfloat16))


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
            source="torch docs, autograd, Default gradient layouts",
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

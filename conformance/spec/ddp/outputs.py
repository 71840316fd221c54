"""Outputs of DDP's forward in containers, dataclasses or other objects, and their gradients."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from conformance import Chapter, Me, Ranks, assert_same_on_all_ranks, covers, world_sizes
from conformance.spec.ddp.models import WIDTH, Recipe, normal
from conformance.spec.ddp.training_runs import Options, train

chapter = Chapter("ddp")


OPTIONS: list[Options] = [{}, {"find_unused_parameters": True}, {"static_graph": True}]


@dataclass
class Result:
    """An output, as transformers return it."""

    score: Tensor
    parts: list[Tensor]
    name: str = ""


class Pair(NamedTuple):
    """A named tuple."""

    left: Tensor
    right: Tensor


class Named(dict[str, Any]):
    """A dict, as transformers had before dataclasses."""


class Opaque:
    """An object of a class that is not a known container."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


def make_output(kind: str, a: Tensor, b: Tensor) -> Any:
    outputs: dict[str, Any] = {
        "tensor": a,
        "tuple": (a, b),
        "namedtuple": Pair(a, b),
        "list": [a, [b]],
        "inner namedtuple": {"a": Pair(a, b), "b": [Pair(b, a)]},
        "dict": {"a": a, "b": {"c": b}},
        "ordered": OrderedDict(z=a, a=b),
        "subclass of dict": Named(a=a, b=[b]),
        "dataclass": Result(a, [b], "name"),
        "optional": (a, None, b),
        "mixed": ({"a": [a, None, 3]}, (b, "text")),
        "none": None,
    }
    return outputs[kind]


class Returning(nn.Module):
    """Two layers whose outputs come back in a container."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, 2).double()
        self.b = nn.Linear(WIDTH, 2).double()
        self.kind = kind

    def forward(self, x: Tensor) -> Any:
        return make_output(self.kind, self.a(x), self.b(x))


def returned(me: Me, kind: str, options: Options) -> tuple[str, Any]:
    """Type and value of the output."""
    model = me.ddp(Recipe(Returning, (kind,))().to(me.device), **options)
    output = model(torch.ones(1, WIDTH, dtype=torch.float64, device=me.device))
    return type(output).__name__, output


@chapter.must(
    "ddp/outputs",
    "forward returns what the module returns: tensors, tuples, named tuples, lists, dicts, None "
    "and objects that are not containers keep their types and values.",
    source="torch 2.13, test_ddp_namedtuple; pytorch#46001",
    needs="dtype:float64",
)
@world_sizes(2)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(
    "kind",
    [
        *("tensor", "tuple", "namedtuple", "list", "dict", "ordered", "dataclass", "optional"),
        *("inner namedtuple", "mixed", "none"),
    ],
)
def test_outputs_come_back(ranks: Ranks, kind: str, options: Options) -> None:
    want = Recipe(Returning, (kind,))()(torch.ones(1, WIDTH, dtype=torch.float64))
    got = ranks.run(returned, kind, options)
    assert_same_on_all_ranks(got, (type(want).__name__, want), what="output")


@chapter.must(
    "ddp/nested-outputs",
    "Gradients are averaged if the tensors that the loss uses are in nested tuples, dicts and "
    "lists, with every way of handling unused parameters.",
    source="torch 2.13, test_ddp_static_graph_nested_types",
    rests_on=("ddp/average", "ddp/outputs"),
)
@world_sizes(2)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("kind", ["tuple", "namedtuple", "list", "dict", "mixed"])
def test_gradients_of_nested_outputs(ranks: Ranks, kind: str, options: Options) -> None:
    steps = [[(normal((2, WIDTH), i + r),) for r in range(2)] for i in range(3)]
    train(ranks, Recipe(Returning, (kind,)), steps, options)


@chapter.must(
    "ddp/dataclass-output",
    "Gradients are averaged if the module returns a dataclass, with and without a search for "
    "unused parameters.",
    source="torch, test_c10d_common.py: test_dataclass_output, test_dataclass_output_unused_param",
    rests_on=("ddp/average", "ddp/outputs"),
)
@world_sizes(2)
@pytest.mark.parametrize("options", OPTIONS[:2], ids=str)
def test_gradients_of_dataclasses(ranks: Ranks, options: Options) -> None:
    steps = [[(normal((2, WIDTH), i + r),) for r in range(2)] for i in range(3)]
    train(ranks, Recipe(Returning, ("dataclass",)), steps, options)


@covers("ddp/nested-outputs")
@world_sizes(2)
@pytest.mark.parametrize("options", OPTIONS[:2], ids=str)
def test_gradients_of_a_subclass_of_dict(ranks: Ranks, options: Options) -> None:
    steps = [[(normal((2, WIDTH), i + r),) for r in range(2)] for i in range(3)]
    train(ranks, Recipe(Returning, ("subclass of dict",)), steps, options)


@chapter.must(
    "ddp/dataclass-output-of-a-static-graph",
    "Gradients are averaged if the module returns a dataclass and the graph is static, in the "
    "first step as well.",
    source="torch 2.13 docs, DistributedDataParallel, argument static_graph: any graph that "
    "does not change",
    rests_on="ddp/dataclass-output",
)
@world_sizes(2)
def test_gradients_of_dataclasses_of_a_static_graph(ranks: Ranks) -> None:
    steps = [[(normal((2, WIDTH), i + r),) for r in range(2)] for i in range(3)]
    train(ranks, Recipe(Returning, ("dataclass",)), steps, {"static_graph": True})


class Chained(nn.Module):
    """All parameters have a part in what an opaque object holds."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, 2).double()

    def forward(self, x: Tensor) -> Opaque:
        return Opaque(self.a(x))


def gradient_of_opaque(me: Me, x: Tensor) -> list[Tensor]:
    model = me.ddp(Recipe(Chained)().to(me.device))
    grads = []
    for _ in range(2):
        model.zero_grad()
        model(x.to(me.device)).value.sum().backward()
        grads.append(model.module.a.weight.grad.clone())
    return grads


@chapter.must(
    "ddp/output-that-is-no-container",
    "Gradients are averaged if the module returns its tensors in an object of a class that DDP "
    "does not know.",
    source="observed, torch 2.13.0; future and RRef outputs in pytorch#50790",
    rests_on="ddp/average",
)
@world_sizes(2)
def test_an_object_of_an_unknown_class(ranks: Ranks) -> None:
    xs = [torch.full((1, WIDTH), 1.0 + 2 * r, dtype=torch.float64) for r in range(2)]
    want = [torch.full((2, WIDTH), 2.0, dtype=torch.float64)] * 2
    got = ranks.run_each(gradient_of_opaque, [(x,) for x in xs])
    assert_same_on_all_ranks(got, want, what="gradients")

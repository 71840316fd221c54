"""The DDP wrapper as an nn.Module: train and eval modes, state dict metadata, None arguments."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from conformance import Chapter, Me, Ranks, assert_same_on_all_ranks, world_sizes

chapter = Chapter("ddp")


class Layered(nn.Module):
    """A layer with a version of its own state among others. Its answer tells what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 3)
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: Tensor, mask: Tensor | None, **more: Any) -> tuple[Tensor, bool, Any]:
        return self.norm(self.first(x)), mask is None, more


def versions(me: Me) -> tuple[dict[str, Any], bool]:
    """The metadata of the wrapper's state, and whether it is the module's under the prefix."""
    model = me.ddp(Layered().to(me.device))
    got = dict(model.state_dict()._metadata)
    of_module = model.module.state_dict(prefix="module.")._metadata
    return got, all(got.get(name) == value for name, value in of_module.items())


@chapter.must(
    "ddp/state-dict-metadata",
    "The wrapper's state_dict keeps the versions of its modules, each under its name with the "
    "prefix, and of the wrapper.",
    source="torch 2.13 docs, Module.state_dict: _metadata; load_state_dict reads versions there",
    rests_on="ddp/state-dict",
)
@world_sizes(2)
def test_a_state_knows_its_versions(ranks: Ranks) -> None:
    want = {
        "": {"version": 1},
        "module": {"version": 1},
        "module.first": {"version": 1},
        "module.norm": {"version": nn.BatchNorm1d._version},
    }
    assert_same_on_all_ranks(ranks.run(versions), want=(want, True), what="metadata")


def wrapped_midway(me: Me) -> tuple[list[bool], bool, bool]:
    """Modes, whether the next random number is the same, and whether the gradients are."""
    module = Layered().to(me.device)
    module.train()
    module.norm.eval()
    grads = [torch.full_like(param, me.rank + 1.0) for param in module.parameters()]
    for param, grad in zip(module.parameters(), grads, strict=True):
        param.grad = grad.clone()
    torch.manual_seed(7)
    want = torch.rand(3)
    torch.manual_seed(7)
    me.ddp(module)
    same_numbers = torch.equal(torch.rand(3), want)
    now = [param.grad for param in module.parameters()]
    same = all(g is not None and torch.equal(g, old) for g, old in zip(now, grads, strict=True))
    return [part.training for part in module.modules()], same_numbers, same


@chapter.must(
    "ddp/wrapping-midway",
    "Wrapping changes neither the modes of modules, nor the random numbers that come next, nor "
    "gradients that are there.",
    source="derived: a model may be wrapped in the middle of its training",
    rests_on="ddp/initial-state",
)
@world_sizes(2)
def test_wrapping_changes_nothing_else(ranks: Ranks) -> None:
    want = ([True, True, False], True, True)
    assert_same_on_all_ranks(ranks.run(wrapped_midway), want=want, what="modes, numbers, grads")


def modes(me: Me) -> list[Any]:
    """For each way to set the mode: whether the wrapper came back, its mode, and the module's."""
    model = me.ddp(Layered().to(me.device))
    seen: list[Any] = []
    for change in (model.eval, model.train, lambda: model.train(False), lambda: model.train(True)):
        same = change() is model
        seen.append((same, model.training, model.module.training, model.module.norm.training))
    return seen


@chapter.must(
    "ddp/modes-return-the-wrapper",
    "train and eval set the mode of the wrapper and of its module, and return the wrapper.",
    source="torch 2.13 docs, Module.train, Module.eval",
)
@world_sizes(2)
def test_modes_are_set_and_return_the_wrapper(ranks: Ranks) -> None:
    want = [(True, mode, mode, mode) for mode in (False, True, False, True)]
    assert_same_on_all_ranks(ranks.run(modes), want=want, what="modes")


def answers(me: Me) -> list[Any]:
    """What the module says of the arguments of three calls."""
    model = me.ddp(Layered().to(me.device))
    x = torch.ones(4, 2, device=me.device)
    calls = [
        model(x, None),
        model(x, mask=None, other=None),
        model(x, torch.zeros(1, device=me.device), other=None, last=1),
    ]
    return [(was_none, more) for _, was_none, more in calls]


@chapter.must(
    "ddp/none-arguments",
    "Arguments that are None reach the module as None, by position and by name.",
    source="torch 2.13 docs, DistributedDataParallel",
    rests_on="ddp/arguments",
)
@world_sizes(2)
def test_none_arrives(ranks: Ranks) -> None:
    want = [(True, {}), (True, {"other": None}), (False, {"other": None, "last": 1})]
    assert_same_on_all_ranks(ranks.run(answers), want=want, what="arguments")

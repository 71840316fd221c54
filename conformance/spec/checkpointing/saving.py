"""DDP state dicts of models and optimizers: keys, strict loading, exchange with other wrappers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from conformance import (
    Chapter,
    Me,
    Ranks,
    assert_each_rank,
    assert_same_on_all_ranks,
    assert_that,
    world_sizes,
)
from conformance.spec.checkpointing.networks import NON_REENTRANT
from conformance.spec.checkpointing.saved_model import Model, copied, optimizer_of, step
from conformance.spec.raising import assert_raised

MODULE = "torch 2.13 docs, Module"
DOCS = "torch tutorial 'Getting Started with DDP', save and load checkpoints"

chapter = Chapter("checkpointing", needs="device:autocast")


State = dict[str, Tensor]
both_optimizers = pytest.mark.parametrize("kind", ["sgd", "adam"])


def keys_of_both(me: Me) -> tuple[list[str], list[str], bool]:
    """Keys of the wrapper's state and of the module's, and whether they hold the same memory."""
    module = Model().to(me.device)
    state, bare = me.ddp(module).state_dict(), module.state_dict()
    shared = all(
        mine.data_ptr() == theirs.data_ptr() and not mine.requires_grad
        for mine, theirs in zip(state.values(), bare.values(), strict=True)
    )
    return list(state), list(bare), shared


@chapter.must(
    "saving/keys",
    "The keys of a wrapper's state dict are the module's, in their order, with the prefix "
    "'module.'; non-persistent buffers are left out.",
    source=f"{MODULE}.state_dict; observed, torch 2.13.0",
)
@world_sizes(1, 2)
def test_keys_are_those_of_the_module_with_a_prefix(ranks: Ranks) -> None:
    for rank, (keys, bare, _) in enumerate(ranks.run(keys_of_both)):
        want = [f"module.{key}" for key in bare]
        assert_that(keys == want, f"got keys {keys}, want {want}", rank)


def state_inside(me: Me) -> tuple[list[str], list[str], bool]:
    """Keys of a module that holds a wrapper, and of the wrapper; whether they can be loaded."""
    outer = nn.ModuleDict({"part": me.ddp(Model().to(me.device))})
    state = copied(outer.state_dict())
    with torch.no_grad():
        for parameter in outer.parameters():
            parameter.fill_(9.0)
    outer.load_state_dict(state)
    loaded = all(torch.equal(now, state[key]) for key, now in outer.state_dict().items())
    return list(state), list(outer["part"].state_dict()), loaded


@chapter.must(
    "saving/inside-another-module",
    "The state dict of a module that holds a wrapper has the wrapper's entries under the "
    "wrapper's name in that module, and can be loaded with them.",
    source=f"{MODULE}.state_dict: prefix and destination",
    rests_on="saving/keys",
)
@world_sizes(2)
def test_a_wrapper_inside_another_module(ranks: Ranks) -> None:
    for rank, (keys, of_wrapper, loaded) in enumerate(ranks.run(state_inside)):
        want = [f"part.{key}" for key in of_wrapper]
        assert_that(keys == want, f"got keys {keys}, want {want}", rank)
        assert_that(loaded, "the state is not what was saved once it is loaded", rank)


@chapter.must(
    "saving/the-modules-tensors",
    "A wrapper's state dict holds the module's parameters and buffers themselves, detached.",
    source=f"{MODULE}.state_dict: 'references to the whole state'",
    rests_on="saving/keys",
)
@world_sizes(1, 2)
def test_a_state_holds_the_modules_own_tensors(ranks: Ranks) -> None:
    for rank, (_, _, shared) in enumerate(ranks.run(keys_of_both)):
        assert_that(shared, "the state is a copy, or still asks for gradients", rank)


def train_a_little(me: Me, model: nn.Module, steps: int = 2, kind: str = "sgd") -> Any:
    """Steps with an optimizer, which is returned."""
    torch.manual_seed(me.rank)
    optimizer = optimizer_of(kind, model)
    for i in range(steps):
        step(me, model, optimizer, i)
    return optimizer


def state_after_training(me: Me, options: dict[str, Any]) -> State:
    """What a rank would save."""
    model = me.ddp(Model().to(me.device), **options)
    train_a_little(me, model, steps=3)
    state: State = copied(dict(model.module.state_dict()))
    # Batch norm's statistics are rank 0's from the next forward pass on.
    return {key: value for key, value in state.items() if "running" not in key}


@chapter.must(
    "saving/any-rank",
    "After training steps, all ranks have the same bits in their parameters, so that one rank's "
    "file serves all.",
    source=f"{DOCS}: 'all processes should see same parameters'",
    rests_on="saving/keys",
)
@world_sizes(2, 3)
@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}], ids=str)
def test_all_ranks_would_save_the_same(ranks: Ranks, options: dict[str, Any]) -> None:
    assert_same_on_all_ranks(ranks.run(state_after_training, options), what="state")


def wrap_bare(me: Me, module: nn.Module) -> nn.Module:
    return module


def wrap_torch(me: Me, module: nn.Module) -> nn.Module:
    return TorchDDP(module)


def wrap_target(me: Me, module: nn.Module) -> nn.Module:
    wrapped: nn.Module = me.ddp(module)
    return wrapped


Wrap = Callable[[Me, nn.Module], nn.Module]
WRAPS: dict[str, Wrap] = {"bare": wrap_bare, "torch": wrap_torch, "target": wrap_target}


def exchange(me: Me, source: str, sink: str) -> tuple[State, State]:
    """A state after training, and what another model's state is once it has loaded that."""
    giver = WRAPS[source](me, Model(seed=1).to(me.device))
    train_a_little(me, giver)
    taker = WRAPS[sink](me, Model(seed=2).to(me.device))
    state = dict(giver.state_dict())
    if sink == "bare" and source != "bare":
        consume_prefix_in_state_dict_if_present(state, "module.")
    elif source == "bare" and sink != "bare":
        state = {f"module.{key}": value for key, value in state.items()}
    taker.load_state_dict(state, strict=True)
    return copied(state), copied(dict(taker.state_dict()))


@chapter.must(
    "saving/exchange-with-the-module",
    "A bare module strictly loads a wrapper's state without its prefix, and a wrapper strictly "
    "loads a module's state with the prefix.",
    source="torch 2.13 docs, consume_prefix_in_state_dict_if_present",
    rests_on="saving/keys",
)
@world_sizes(1, 2)
@pytest.mark.parametrize(("source", "sink"), [("target", "bare"), ("bare", "target")])
def test_states_go_to_the_bare_module_and_back(ranks: Ranks, source: str, sink: str) -> None:
    assert_exchanged(ranks.run(exchange, source, sink))


@chapter.must(
    "saving/exchange-with-torch",
    "torch's DistributedDataParallel strictly loads the target's state dict as it is, and the "
    "other way round.",
    source=f"{MODULE}.load_state_dict",
    rests_on="saving/keys",
)
@world_sizes(2)
@pytest.mark.parametrize(("source", "sink"), [("target", "torch"), ("torch", "target")])
def test_states_go_to_torchs_wrapper_and_back(ranks: Ranks, source: str, sink: str) -> None:
    assert_exchanged(ranks.run(exchange, source, sink))


def assert_exchanged(got: list[tuple[State, State]]) -> None:
    """Every rank's model has what it loaded."""
    assert_each_rank([taken for _, taken in got], [given for given, _ in got], what="state")


def load_damaged(me: Me, damage: str) -> None:
    """Load a state that lacks a key, or has one too many, or a tensor of another shape."""
    model = me.ddp(Model().to(me.device))
    state = dict(model.state_dict())
    if damage == "missing":
        del state["module.after.weight"]
    elif damage == "unexpected":
        state["module.stranger"] = torch.zeros(1)
    else:
        state["module.after.weight"] = torch.zeros(1)
    model.load_state_dict(state)


@chapter.must(
    "saving/strict",
    "A state dict with a missing key, an extra key or a tensor of another shape raises "
    "RuntimeError that names the key.",
    source=f"{MODULE}.load_state_dict; observed, torch 2.13.0",
    rests_on="saving/keys",
)
@world_sizes(1, 2)
@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("missing", r"Missing key\(s\) in state_dict: \"module\.after\.weight\""),
        ("unexpected", r"Unexpected key\(s\) in state_dict: \"module\.stranger\""),
        ("shape", r"size mismatch for module\.after\.weight"),
    ],
    ids=["missing", "unexpected", "shape"],
)
def test_a_state_that_does_not_fit(ranks: Ranks, damage: str, words: str) -> None:
    assert_raised(ranks.outcomes(load_damaged, damage), RuntimeError, match=words)


def load_on_rank_0(me: Me) -> tuple[State, State]:
    """What rank 0 loaded before wrapping, and the state of this rank's wrapper."""
    module = Model(seed=me.rank).to(me.device)
    saved = copied(Model(seed=9).to(me.device).state_dict())
    saved["norm.running_mean"].fill_(5)
    if me.rank == 0:
        module.load_state_dict(saved)
    return saved, copied(dict(me.ddp(module).module.state_dict()))


@chapter.must(
    "saving/loaded-by-rank-0",
    "A state that only rank 0 has loaded into its module is on all ranks once the module is "
    "wrapped.",
    source=f"{DOCS}; DistributedDataParallel broadcasts rank 0's state",
    rests_on="saving/keys",
)
@world_sizes(2, 3)
def test_what_rank_0_loaded_is_everybodys_after_wrapping(ranks: Ranks) -> None:
    got = ranks.run(load_on_rank_0)
    assert_each_rank([state for _, state in got], [dict(saved) for saved, _ in got], what="state")


def exchange_optimizer(me: Me, kind: str, source: str, sink: str) -> tuple[Any, Any]:
    """State of model and optimizer, after a step that follows on loading, of giver and taker."""
    giver = WRAPS[source](me, Model(seed=1).to(me.device))
    mine = train_a_little(me, giver, kind=kind)
    taker = WRAPS[sink](me, Model(seed=2).to(me.device))
    theirs = optimizer_of(kind, taker)
    _inner(taker).load_state_dict(copied(dict(_inner(giver).state_dict())))
    theirs.load_state_dict(copied(mine.state_dict()))
    seen = []
    for model, optimizer in ((giver, mine), (taker, theirs)):
        for i, parameter in enumerate(model.parameters()):
            parameter.grad = torch.full_like(parameter, 0.5 + i)
        optimizer.step()
        seen.append(copied([dict(_inner(model).state_dict()), optimizer.state_dict()["state"]]))
    return seen[0], seen[1]


def _inner(model: Any) -> nn.Module:
    module: nn.Module = model if isinstance(model, Model) else model.module
    return module


@chapter.must(
    "saving/optimizer",
    "The state of an optimizer made from a wrapper's parameters can be used by one made from the "
    "parameters of the bare module or of torch's wrapper, and the other way round.",
    source="torch 2.13 docs, Optimizer.state_dict: parameters are known by their order",
    rests_on="saving/keys",
)
@world_sizes(2)
@both_optimizers
@pytest.mark.parametrize(
    ("source", "sink"),
    [("target", "bare"), ("bare", "target"), ("target", "torch"), ("torch", "target")],
)
def test_optimizers_go_on_with_what_another_one_saved(
    ranks: Ranks, kind: str, source: str, sink: str
) -> None:
    got = ranks.run(exchange_optimizer, kind, source, sink)
    want = [mine for mine, _ in got]
    assert_each_rank([theirs for _, theirs in got], want, what="state of model and optimizer")


def load_between_steps(me: Me, options: dict[str, Any]) -> tuple[State, State]:
    """Train, go back to the start by loading it, and train again; both states."""
    model = me.ddp(Model().to(me.device), **options)
    start = copied(dict(model.state_dict()))
    train_a_little(me, model, steps=3)
    first = copied(dict(model.state_dict()))
    model.load_state_dict(start)
    train_a_little(me, model, steps=3)
    return first, copied(dict(model.state_dict()))


@chapter.must(
    "saving/loading-between-steps",
    "A wrapper that has trained can load a state in place and train from there, and gets the "
    "same bits as when it trained from there before.",
    source=f"{MODULE}.load_state_dict copies in place",
    rests_on="saving/keys",
)
@world_sizes(2)
@pytest.mark.parametrize(
    "options", [{}, {"gradient_as_bucket_view": True}, {"static_graph": True}], ids=str
)
def test_a_wrapper_that_trained_can_load(ranks: Ranks, options: dict[str, Any]) -> None:
    got = ranks.run(load_between_steps, options)
    assert_each_rank([again for _, again in got], [first for first, _ in got], what="state")


def save_amid_a_step(me: Me, disturbed: bool) -> State:
    """The state after steps in which it was also taken between forward and backward."""
    torch.manual_seed(me.rank)
    model = me.ddp(Model(NON_REENTRANT).to(me.device))
    optimizer = optimizer_of("sgd", model)
    for i in range(2):
        optimizer.zero_grad()
        x = torch.full((4, 3), 0.5 + i + me.rank, device=me.device)
        y = model(x)
        if disturbed:
            copied(dict(model.state_dict()))
        y.square().sum().backward()
        if disturbed:
            copied(optimizer.state_dict())
        optimizer.step()
    return copied(dict(model.state_dict()))  # type: ignore[no-any-return]  # a copy is like its original


@chapter.must(
    "saving/at-any-time",
    "Taking a state dict between forward and backward, when activations are still to be "
    "recomputed, changes nothing.",
    source=f"{MODULE}.state_dict",
    rests_on="saving/keys",
)
@world_sizes(2)
def test_saving_between_forward_and_backward(ranks: Ranks) -> None:
    want = ranks.run(save_amid_a_step, False)
    assert_each_rank(ranks.run(save_amid_a_step, True), want, what="state")

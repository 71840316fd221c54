"""DDP with torch.func, torch.compile, a shared Join, inference mode and packed sequences."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from conformance import Chapter, Me, Ranks, assert_that, world_sizes
from conformance.spec.ddp.models import WIDTH, Perceptron, Recipe, loss_of, normal
from conformance.spec.ddp.training_runs import Options, assert_grads

chapter = Chapter("ddp")


STEPS = 3
OPTIONS: list[Options] = [
    {},
    {"gradient_as_bucket_view": True},
    {"find_unused_parameters": True},
    {"static_graph": True},
]
every_option = pytest.mark.parametrize("options", OPTIONS, ids=str)


def gradients(module: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in module.parameters() if p.grad is not None]


class Scaling(nn.Module):
    """A layer whose output is multiplied by a buffer."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 2).double()
        self.register_buffer("scale", torch.tensor([2.0, 3.0]).double())

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x) * self.scale
        return out


def transform(me: Me) -> dict[str, bool]:
    """Which transforms of the wrapper equal the module's."""
    module = Recipe(Scaling)().to(me.device)
    plain = copy.deepcopy(module)
    model = me.ddp(module)
    x = normal((WIDTH,), 0).to(me.device)
    rows = normal((4, WIDTH), 1).to(me.device)
    ways: dict[str, Any] = {
        "jacfwd": lambda f: torch.func.jacfwd(f)(x),
        "jacrev": lambda f: torch.func.jacrev(f)(x),
        "vmap": lambda f: torch.func.vmap(f)(rows),
    }
    return {name: torch.allclose(way(model), way(plain)) for name, way in ways.items()}


@chapter.should(
    "ddp/functional-transforms-with-buffers",
    "torch.func's transforms of the wrapper give the same results as those of the module, also "
    "if there are buffers.",
    source="pytorch#130932",
    rests_on=("ddp/functional-transforms", "ddp/buffers/before-forward"),
)
@world_sizes(2)
def test_transforms_with_buffers(ranks: Ranks) -> None:
    for rank, agree in enumerate(ranks.run(transform)):
        wrong = [name for name, same in agree.items() if not same]
        assert_that(not wrong, f"not those of the module: {wrong}", rank)


def train_compiled(me: Me, inside: bool, options: Options) -> list[list[Tensor]]:
    """Gradients after each of some steps, each of which adds to a pass inside no_sync."""
    module: Any = Recipe(Perceptron)(seed=me.rank).to(me.device)
    compiled: Any = torch.compile(module, backend="eager")
    model = me.ddp(compiled if inside else module, **options)
    run = model if inside else torch.compile(model, backend="eager")
    seen = []
    for i in range(STEPS):
        model.zero_grad()
        # The graph of a static one begins with a synchronised pass.
        for k, context in enumerate((model.no_sync() if i else None, None)):
            with context or contextlib.nullcontext():
                loss_of(run(normal((2, WIDTH), 20 * i + 10 * k + me.rank).to(me.device))).backward()
        seen.append(gradients(module))
    torch.compiler.reset()
    return seen


@chapter.must(
    "ddp/compiled",
    "Gradients are averaged if torch.compile has compiled the wrapper, or the module in it, in "
    "steps inside no_sync and outside.",
    source="torch 2.13 docs, torch.compile: DistributedDataParallel; pytorch#93672",
    rests_on=("ddp/average", "ddp/no-sync/accumulates"),
)
@world_sizes(2)
@pytest.mark.parametrize("inside", [False, True], ids=["wrapper", "module"])
@pytest.mark.parametrize("options", OPTIONS[:2], ids=str)
def test_compiled(ranks: Ranks, inside: bool, options: Options) -> None:
    got = ranks.run(train_compiled, inside, options)
    module = Recipe(Perceptron)()
    for i in range(STEPS):
        module.zero_grad()
        for k in range(2):
            for rank in range(ranks.world_size):
                x = normal((2, WIDTH), 20 * i + 10 * k + rank)
                (loss_of(module(x)) / ranks.world_size).backward()
        for j, param in enumerate(module.parameters()):
            grads = [steps[i][j] for steps in got]
            assert_grads(grads, param.grad, f"gradient {j} in step {i + 1}")


LENGTHS = [1, 3, 2]


def join_two(me: Me, options: Options) -> list[Tensor]:
    """Parameters of two models that trained by turns, for as many steps as the rank has."""
    modules = [Recipe(Perceptron)(seed=2 * me.rank + i).to(me.device) for i in range(2)]
    models = [me.ddp(module, **options) for module in modules]
    with Join(models):
        for i in range(LENGTHS[me.rank]):
            for k, (model, module) in enumerate(zip(models, modules, strict=True)):
                model.zero_grad()
                loss_of(
                    model(normal((2, WIDTH), 20 * i + 10 * k + me.rank).to(me.device))
                ).backward()
                descend(module)
    return [p.detach().clone() for module in modules for p in module.parameters()]


def descend(module: nn.Module) -> None:
    with torch.no_grad():
        for param in module.parameters():
            if param.grad is not None:
                param.sub_(0.1 * param.grad)


@chapter.must(
    "ddp/join/several-wrappers",
    "Several wrappers may take part in one Join context, and each averages as it does in its own "
    "context.",
    source="torch 2.13 docs, Join: a list of the participating Joinables",
    rests_on=("ddp/join/uneven-inputs", "ddp/join/final-model"),
)
@world_sizes(2, 3)
@pytest.mark.parametrize("options", OPTIONS[:3], ids=str)
def test_two_wrappers_in_one_join(ranks: Ranks, options: Options) -> None:
    got = ranks.run(join_two, options)
    n = ranks.world_size
    modules = [Recipe(Perceptron)(seed=i) for i in range(2)]
    for i in range(max(LENGTHS[:n])):
        for k, module in enumerate(modules):
            module.zero_grad()
            for rank in range(n):
                if i < LENGTHS[rank]:
                    (loss_of(module(normal((2, WIDTH), 20 * i + 10 * k + rank))) / n).backward()
            descend(module)
    for j, param in enumerate(p for module in modules for p in module.parameters()):
        assert_grads([params[j] for params in got], param.detach(), f"parameter {j}")


class Normalising(nn.Module):
    """A layer and batch norm, which takes away what a bias of the layer would add."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 3, bias=False).double()
        self.norm = nn.BatchNorm1d(3).double()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(self.layer(x))
        return out


def infer_between(me: Me, options: Options) -> tuple[list[list[Tensor]], list[bool]]:
    """Gradients after each of some steps, before each of which come passes in inference mode; which
    of parameters and buffers are tensors of inference at the end."""
    module = Recipe(Normalising)(seed=me.rank).to(me.device)
    model = me.ddp(module, **options)
    seen = []
    for i in range(STEPS):
        with torch.inference_mode():
            for training in (True, False):
                model.train(training)
                model(normal((4, WIDTH), 20 * i + 10 + me.rank).to(me.device))
        model.train()
        model.zero_grad()
        loss_of(model(normal((4, WIDTH), 20 * i + me.rank).to(me.device))).backward()
        seen.append(gradients(module))
    return seen, [tensor.is_inference() for tensor in module.state_dict().values()]


@chapter.must(
    "ddp/inference-mode",
    "Forward passes in inference mode, also of a module with buffers, do not change the wrapper: "
    "training continues afterwards.",
    source="torch 2.13 docs, inference_mode; torch 2.13 docs, DistributedDataParallel",
    rests_on="ddp/inference",
)
@world_sizes(2)
@every_option
def test_passes_in_inference_mode(ranks: Ranks, options: Options) -> None:
    got = ranks.run(infer_between, options)
    for rank, (_, kinds) in enumerate(got):
        assert_that(not any(kinds), f"{sum(kinds)} tensors of inference in the module", rank)
    module = Recipe(Normalising)()
    for i in range(STEPS):
        module.zero_grad()
        for rank in range(ranks.world_size):
            x = normal((4, WIDTH), 20 * i + rank)
            (loss_of(module(x)) / ranks.world_size).backward()
        for j, param in enumerate(module.parameters()):
            grads = [steps[i][j] for steps, _ in got]
            assert_grads(grads, param.grad, f"gradient {j} in step {i + 1}")


class Recurrent(nn.Module):
    """Takes and returns a packed sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(WIDTH, 2, batch_first=True).double()

    def forward(self, x: PackedSequence) -> PackedSequence:
        out: PackedSequence = self.layer(x)[0]
        return out


def packed(step: int, rank: int, device: torch.device) -> PackedSequence:
    lengths = [3, 2] if rank % 2 else [3, 1]
    return pack_padded_sequence(normal((2, 3, WIDTH), 10 * step + rank).to(device), lengths, True)


def run_packed(model: Any, x: PackedSequence) -> tuple[Tensor, str]:
    """The loss, and the kind of what was returned."""
    out = model(x)
    return loss_of(out.data), type(out).__name__


def train_packed(me: Me, options: Options) -> tuple[list[list[Tensor]], list[str]]:
    module = Recipe(Recurrent)(seed=me.rank).to(me.device)
    model = me.ddp(module, **options)
    seen, kinds = [], []
    for i in range(STEPS):
        model.zero_grad()
        loss, kind = run_packed(model, packed(i, me.rank, me.device))
        loss.backward()
        kinds.append(kind)
        seen.append(gradients(module))
    return seen, kinds


@chapter.must(
    "ddp/packed-sequences",
    "A PackedSequence is passed in and returned unchanged, and gradients are averaged, with "
    "every way of handling unused parameters.",
    source="torch 2.13 docs, PackedSequence; torch, distributed.py: _find_tensors",
    rests_on=("ddp/arguments", "ddp/nested-outputs"),
)
@world_sizes(2)
@every_option
def test_packed_sequences(ranks: Ranks, options: Options) -> None:
    got = ranks.run(train_packed, options)
    for rank, (_, kinds) in enumerate(got):
        assert_that(set(kinds) == {"PackedSequence"}, f"returned: {kinds}", rank)
    module = Recipe(Recurrent)()
    for i in range(STEPS):
        module.zero_grad()
        for rank in range(ranks.world_size):
            loss, _ = run_packed(module, packed(i, rank, torch.device("cpu")))
            (loss / ranks.world_size).backward()
        for j, param in enumerate(module.parameters()):
            grads = [steps[i][j] for steps, _ in got]
            assert_grads(grads, param.grad, f"gradient {j} in step {i + 1}")

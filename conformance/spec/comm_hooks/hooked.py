"""Trains under DDP with a communication hook and returns gradients; helpers to write hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from conformance import Me, Ranks, assert_same_on_all_ranks
from conformance.harness.traces import Issued, record
from conformance.spec.ddp.models import WIDTH, Perceptron, Recipe, loss_of, normal
from conformance.spec.ddp.training_runs import Options, assert_grads

BYTE = 2**-20
Register = Callable[[Any, Me, Any], None]  # DDP, me, the group that DDP has


def make_model(dtype: str = "float32") -> nn.Module:
    """Two linear layers in float32, as half precision and quantisation expect."""
    return Perceptron((WIDTH, 8, 4), dtype)


def gradients_with(
    me: Me, register: Register, options: Options, steps: int, dtype: str = "float32"
) -> tuple[list[list[Tensor]], list[Issued]]:
    """All gradients after each step, and what the last backward pass issued."""
    group = record()
    module = Recipe(make_model, (dtype,))(seed=me.rank).to(me.device)
    model = me.ddp(module, process_group=group, **options)
    register(model, me, group)
    grads = []
    for i in range(steps):
        model.zero_grad()
        loss = loss_of(model(normal((2, WIDTH), 10 * i + me.rank, dtype).to(me.device)))
        group.take()
        loss.backward()
        grads.append([p.grad.clone() for p in module.parameters() if p.grad is not None])
    return grads, group.take()


def mean_gradients(world_size: int, step: int, dtype: str = "float32") -> list[Tensor]:
    """What plain averaging gives, all of one model."""
    module = Recipe(make_model, (dtype,))()
    for r in range(world_size):
        (loss_of(module(normal((2, WIDTH), 10 * step + r, dtype))) / world_size).backward()
    return [p.grad for p in module.parameters() if p.grad is not None]


def assert_averages(
    ranks: Ranks,
    register: Register,
    *,
    within: float,
    options: Options | None = None,
    steps: int = 3,
    dtype: str = "float32",
) -> list[list[Issued]]:
    """With the hook gradients are the mean, up to `within`, and the same on all ranks."""
    got = ranks.run(gradients_with, register, options or {}, steps, dtype)
    for i in range(steps):
        for j, want in enumerate(mean_gradients(ranks.world_size, i, dtype)):
            mine = [grads[i][j] for grads, _ in got]
            assert_grads(mine, want, f"gradient {j} of step {i + 1}", within)
    assert_same_on_all_ranks([grads for grads, _ in got], what="gradients")
    return [issued for _, issued in got]


def completed(value: Any) -> Any:
    """A future that has its value."""
    future: Any = torch.futures.Future()
    future.set_result(value)
    return future


def sum_of(tensor: Tensor) -> Any:
    """The future of the tensor's sum over the default group's ranks."""
    work: Any = dist.all_reduce(tensor, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def bare(hook: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Without annotations, which would be strings here, and which torch refuses."""
    hook.__annotations__.clear()
    return hook


def run_hook(
    me: Me,
    make: Callable[[], nn.Module],
    shape: tuple[int, ...],
    hook: Callable[[Any, Any], Any],
    options: Options,
    steps: int,
    state: Any = None,
) -> tuple[nn.Module, list[list[Tensor]]]:
    """The module after some steps, and all gradients after each."""
    module = Recipe(make)(seed=0).to(me.device)
    model = me.ddp(module, **options)
    model.register_comm_hook(state, bare(hook))
    grads = []
    for i in range(steps):
        model.zero_grad()
        loss_of(model(normal(shape, 10 * i + me.rank, "float32").to(me.device))).backward()
        grads.append([p.grad.clone() for p in module.parameters() if p.grad is not None])
    return module, grads

"""A small model with its optimizer, training step and RNG state, for cases of saving, resuming."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from conformance import Me
from conformance.oracle.data import seeded_generator
from conformance.spec.checkpointing.networks import WIDTH, recomputed
from conformance.spec.checkpointing.training import batch, loss_of


class Model(nn.Module):
    """Layers with parameters, buffers that are saved, one that is not, and dropout."""

    scratch: Tensor

    def __init__(self, how: str = "", seed: int = 0) -> None:
        super().__init__()
        with seeded_generator(seed):
            self.before, self.after = nn.Linear(WIDTH, 4), nn.Linear(4, WIDTH, bias=False)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.25)
        self.register_buffer("scratch", torch.full((2,), float(seed)), persistent=False)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.norm(torch.tanh(self.before(x))))
        y: Tensor = recomputed(self.after, x, how=self.how)
        return y


def optimizer_of(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    """One that keeps state for each parameter."""
    if kind == "adam":
        return torch.optim.Adam(model.parameters(), 0.05)
    return torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)


def step(me: Me, model: nn.Module, optimizer: torch.optim.Optimizer, i: int) -> None:
    """Step number i on this rank's batch."""
    optimizer.zero_grad()
    loss_of(model(batch(me.rank, i, size=4).float().to(me.device))).backward()
    optimizer.step()


def copied(state: Any) -> Any:
    """A state dict, or a container of tensors, that later steps leave alone."""
    if isinstance(state, Tensor):
        return state.detach().clone()
    if isinstance(state, dict):
        return {key: copied(value) for key, value in state.items()}
    if isinstance(state, list):
        return [copied(value) for value in state]
    return state


def random_state(device: torch.device) -> Tensor:
    """Of the generator that dropout uses on this device."""
    if device.type == "cpu":
        return torch.get_rng_state()
    state: Tensor = torch.get_device_module(device).get_rng_state(device)
    return state


def set_random_state(state: Tensor, device: torch.device) -> None:
    """The inverse of `random_state`."""
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)

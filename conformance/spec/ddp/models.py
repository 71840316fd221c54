"""Small models for DDP cases (branching, convolutional, of several dtypes), and a loss for them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from conformance.oracle.data import seeded_generator

WIDTH = 3


def tensors_in(output: Any) -> list[Tensor]:
    """Every tensor in nested containers, in order."""
    if isinstance(output, Tensor):
        return [output]
    if isinstance(output, Mapping):
        output = list(output.values())
    elif is_dataclass(output) and not isinstance(output, type):
        output = [getattr(output, field.name) for field in fields(output)]
    if isinstance(output, list | tuple):
        return [tensor for item in output for tensor in tensors_in(item)]
    return []


def loss_of(output: Any) -> Tensor:
    """A loss in which every element of every tensor has a gradient of its own."""
    total = torch.zeros((), dtype=torch.float64)
    for i, y in enumerate(tensors_in(output)):
        if y.is_complex():
            y = torch.view_as_real(y)
        total = total.to(y.device)
        weights = torch.arange(1, y.numel() + 1, dtype=torch.float64, device=y.device) / 7 + i
        y = y.to(torch.float64)
        total = total + (y * weights.sin().view(y.shape)).sum() + y.square().sum() / 5
    return total


class Perceptron(nn.Module):
    """Linear layers in float64 with tanh between them."""

    def __init__(self, widths: Sequence[int] = (WIDTH, 4, 2), dtype: str = "float64") -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(m, n, dtype=getattr(torch, dtype)) for m, n in itertools.pairwise(widths)
        )

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = layer(x) if i == 0 else layer(torch.tanh(x))
        return x


class Branching(nn.Module):
    """Layers side by side; each call names those that it uses, in the order of their use.

    The output of a call that uses none has a gradient, and no parameter has a part in it.
    """

    def __init__(self, count: int = 3) -> None:
        super().__init__()
        self.branches = nn.ModuleList(
            nn.Linear(WIDTH, 1 + i, bias=False).double() for i in range(count)
        )

    def forward(self, x: Tensor, uses: Sequence[int]) -> list[Tensor]:
        return [self.branches[i](x) for i in uses] or [x.clone().requires_grad_() * 2]


class InSequence(nn.Module):
    """Scales of one size, applied one after the other in the order that is asked for."""

    def __init__(self, count: int = 3) -> None:
        super().__init__()
        self.scales = nn.ParameterList(torch.rand(WIDTH).double() + 0.5 for _ in range(count))

    def forward(self, x: Tensor, order: Sequence[int]) -> Tensor:
        for i in order:
            x = torch.tanh(x * self.scales[i]) + x
        return x


class Convolving(nn.Module):
    """A convolution whose parameters and input may be channels-last."""

    def __init__(self, dtype: str = "float64", channels_last: bool = True) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 3, 2, dtype=getattr(torch, dtype))
        self.second = nn.Conv2d(3, 2, 2, dtype=getattr(torch, dtype))
        if channels_last:
            self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # not in the stub

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(torch.tanh(self.first(x)))
        return y


class Typed(nn.Module):
    """Parameters of the given shapes and dtypes, used in the given order."""

    def __init__(self, kinds: Sequence[tuple[tuple[int, ...], str]], order: Sequence[int]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(
            torch.randn(shape, dtype=torch.float64).to(getattr(torch, dtype))
            for shape, dtype in kinds
        )
        self.order = order

    def forward(self, x: Tensor) -> Tensor:
        for i in self.order:
            weight = self.weights[i]
            wide = torch.view_as_real(weight) if weight.is_complex() else weight
            x = torch.tanh(x * wide.to(x.dtype).sum() / max(1, wide.numel())) + x
        return x


@dataclass(frozen=True)
class Recipe:
    """How to make a model; ranks make it with different numbers unless it is told otherwise.

    make: a class or function at the top level of a module.
    """

    make: Callable[..., nn.Module]
    args: tuple[Any, ...] = ()

    def __call__(self, seed: int = 0) -> nn.Module:
        with seeded_generator(seed):
            return self.make(*self.args)


def normal(shape: Sequence[int], seed: int, dtype: str = "float64") -> Tensor:
    """Numbers that differ with the seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float64).to(
        getattr(torch, dtype)
    )


class Scaled(nn.Module):
    """Its gradient is its input."""

    def __init__(self, dtype: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, dtype=getattr(torch, dtype)))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).sum()


class Counting(nn.Module):
    """Notes its buffer at the beginning of each forward and changes it by the rank's number."""

    count: Tensor

    def __init__(self, step: int = 0, replace: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 1).double()
        self.register_buffer("count", torch.zeros(2))
        self.step, self.replace = step, replace
        self.seen: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(self.count[0].item())
        if self.replace:
            self.count = self.count + self.step
        else:
            self.count += self.step
        y: Tensor = self.layer(x)
        return y


def numbered(rank: int, step: int) -> Tensor:
    """The batch of a rank in a step."""
    return normal((2, WIDTH), 10 * step + rank)


class Remembering(nn.Module):
    """A buffer that each forward sets to the number of the rank."""

    whose: Tensor

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 1).double()
        self.register_buffer("whose", torch.full((1,), -1.0))
        self.rank = rank

    def forward(self, x: Tensor) -> Tensor:
        self.whose.fill_(self.rank)
        y: Tensor = self.layer(x)
        return y

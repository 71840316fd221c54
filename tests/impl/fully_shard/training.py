"""Training runs on one rank, of a model that torch's `fully_shard` or impl's has sharded.

A run returns all that a user could see of it, tensor by tensor, for comparison.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

Shard = Callable[..., Any]  # `fully_shard`
_COLLECTIVES = (
    *("all_gather_single", "all_gather_into_tensor"),
    *("reduce_scatter_single", "reduce_scatter_tensor", "all_reduce"),
)


class Block(nn.Module):
    """Sizes that two, three and four ranks cannot divide evenly."""

    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.wide = nn.Linear(width, width + 3)
        self.narrow = nn.Linear(width + 3, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.norm(x + self.narrow(torch.tanh(self.wide(x))))
        return result


class Recomputing(Block):
    """Its forward runs again in backward."""

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return result


class Model(nn.Module):
    """(n, 4) -> (n, 2)."""

    def __init__(self, block: type[nn.Module] = Block, recomputes: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(4, 5)
        self.blocks = nn.ModuleList(block() for _ in range(3))
        self.last = nn.Linear(5, 2)
        self.recomputes = recomputes

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
        return self.last(x)  # type: ignore[no-any-return]  # torch's modules return Any

    def first_half(self, x: Tensor) -> Tensor:
        return self.last(self.first(x))  # type: ignore[no-any-return]  # torch's modules return Any


class Tied(nn.Module):
    """(n, 4) -> (n, 4), with one weight in two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.last.weight = self.first.weight
        self.blocks = nn.ModuleList()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))  # type: ignore[no-any-return]  # torch's modules return Any


def sharded(shard: Shard, model: Any = None, **arguments: Any) -> Any:
    """The model, each block in a unit of its own."""
    torch.manual_seed(0)
    model = Model() if model is None else model
    for block in model.blocks:
        shard(block, **arguments)
    return shard(model, **arguments)


def everywhere(model: Any, method: str, *args: Any) -> Any:
    """Call a method of each sharded module."""
    for module in model.modules():
        if hasattr(module, method):
            getattr(module, method)(*args)
    return model


def train(model: Any, steps: int = 3, before: Callable[[Any, int], object] | None = None) -> Any:
    """Losses, norms of gradients, gradients and parameters of some steps."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    seen: list[Any] = []
    for step in range(steps):
        if before is not None:
            before(model, step)
        loss = loss_of(model, step)
        loss.backward()
        seen += [loss.detach(), nn.utils.clip_grad_norm_(model.parameters(), 1.0)]
        seen += gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        seen += [local(param) for param in model.parameters()]
    return seen


def accumulate(model: Any, choose: Callable[[Any, bool], object], steps: int = 4) -> Any:
    """Steps of two backwards; `choose(model, is_last)` before each of them."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: list[Any] = []
    for step in range(steps):
        is_last = step % 2 == 1
        choose(model, is_last)
        loss_of(model, step).backward()
        seen += gradients(model)
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
            seen += [local(param) for param in model.parameters()]
    return seen


def loss_of(model: Any, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    loss: Tensor = model(torch.randn(3, 4, generator=generator)).float().square().mean()
    return loss


def gradients(model: Any) -> list[Tensor | None]:
    return [None if p.grad is None else local(p.grad) for p in model.parameters()]


def local(tensor: Tensor) -> Tensor:
    """A copy of what this rank has of it."""
    tensor = tensor.detach()
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).clone()


@contextlib.contextmanager
def traced() -> Iterator[list[tuple[str, tuple[int, ...], torch.dtype]]]:
    """The collectives that this rank starts: operation, shape of the result, dtype."""
    trace: list[tuple[str, tuple[int, ...], torch.dtype]] = []
    depth = 0

    def wrapper(name: str, collective: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal depth
            result: Any = args[0] if args else kwargs.get("output_tensor", kwargs.get("output"))
            if depth == 0:  # one may call another
                kind = "_".join(name.split("_")[:2])
                trace.append((kind, tuple(result.shape), result.dtype))
            depth += 1
            try:
                return collective(*args, **kwargs)
            finally:
                depth -= 1

        return call

    with contextlib.ExitStack() as patches:
        for name in _COLLECTIVES:
            if hasattr(dist, name):
                wrapped = wrapper(name, getattr(dist, name))
                patches.enter_context(mock.patch.object(dist, name, wrapped))
        yield trace

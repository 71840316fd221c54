"""Models, data and comparisons of the FSDP tests."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor

from impl.fsdp import FullyShardedDataParallel
from impl.torch_private import ShardedTensor

CPU = torch.device("cpu")
VOCABULARY = 11


class Block(nn.Module):
    """A residual block whose sizes no world size divides."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return out


class Model(nn.Module):
    """Embedding, blocks, head; optionally tied, or with parts frozen."""

    scale: Tensor

    def __init__(self, *, tied: bool = False, frozen: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 10)
        self.blocks = nn.ModuleList([Block(10, 7) for _ in range(3)])
        self.head = nn.Linear(10, VOCABULARY, bias=False)
        self.register_buffer("scale", torch.tensor(1.5))
        if tied:
            self.head.weight = self.embedding.weight
        if frozen:
            self.blocks[1].requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) * self.scale
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


BLOCK_POLICY = ModuleWrapPolicy({Block})


def make_model(seed: int = 5, **kwargs: Any) -> Model:
    torch.manual_seed(seed)
    return Model(**kwargs)


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    """Tokens and labels that differ on every rank, also in their number."""
    generator = torch.Generator().manual_seed(1000 * step + 17 * rank + 1)
    shape = (3 + rank % 2, 4)
    return (
        torch.randint(0, VOCABULARY, shape, generator=generator),
        torch.randint(0, VOCABULARY, shape, generator=generator),
    )


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    tokens, labels = batch(rank, step)
    return nn.functional.cross_entropy(model(tokens).float().flatten(0, 1), labels.flatten())


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int) -> Tensor:
    loss = loss_of(model, rank, step)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def differences(a: Any, b: Any, path: str = "") -> list[str]:
    """Where two results differ in value, shape, dtype, class or order; empty if nowhere."""
    if isinstance(a, ShardedTensor) and isinstance(b, ShardedTensor):
        mine = [(s.metadata.shard_offsets, s.tensor) for s in a.local_shards()]
        theirs = [(s.metadata.shard_offsets, s.tensor) for s in b.local_shards()]
        return differences([a.metadata().size, *mine], [b.metadata().size, *theirs], path)
    if isinstance(a, DTensor) and isinstance(b, DTensor):
        return differences(
            (a.to_local(), str(a.placements)), (b.to_local(), str(b.placements)), path
        )
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        same = a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)
        return [] if same else [f"{path}: {a} and {b}"]
    if type(a) is not type(b):
        return [f"{path}: {type(a)} and {type(b)}"]
    if isinstance(a, dict):
        if a.keys() != b.keys():
            return [f"{path}: keys {sorted(map(str, a))} and {sorted(map(str, b))}"]
        return [d for key in a for d in differences(a[key], b[key], f"{path}.{key}")]
    if isinstance(a, (list, tuple)):
        if len(a) != len(b):
            return [f"{path}: {len(a)} and {len(b)} entries"]
        return [
            d
            for i, (x, y) in enumerate(zip(a, b, strict=True))
            for d in differences(x, y, f"{path}[{i}]")
        ]
    return [] if a == b else [f"{path}: {a} and {b}"]


def wrapped(strategy: ShardingStrategy, orig: bool, **kwargs: Any) -> FullyShardedDataParallel:
    """A model of `make_model`, each block a unit."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # NO_SHARD is deprecated
        return FullyShardedDataParallel(
            make_model(),
            auto_wrap_policy=BLOCK_POLICY,
            sharding_strategy=strategy,
            use_orig_params=orig,
            **kwargs,
        )


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def full_params(model: nn.Module) -> dict[str, Tensor]:
    """Copies of all parameters, whole, by name."""
    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        return {name: p.detach().clone() for name, p in model.named_parameters()}

"""Networks for FSDP cases as plain data: units, each rank's inputs, and the loss of a batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from conformance.oracle.data import dtype_named, seeded_generator
from conformance.oracle.sharding import FlatSizes, flat_sizes


class Block(nn.Module):
    """A residual block; may hold a block of its own."""

    def __init__(self, width: int, hidden: int, inner: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)
        self.inner = Block(width, hidden) if inner else None

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(torch.tanh(self.up(self.norm(x))))
        if self.inner is not None:
            x = self.inner(x)
        return x


class Network(nn.Module):
    """Embedding, blocks, head, and a buffer."""

    scale: Tensor

    def __init__(self, net: Net) -> None:
        super().__init__()
        self.embedding = nn.Embedding(net.vocabulary, net.width)
        self.blocks = nn.ModuleList(
            Block(net.width, net.hidden, net.nested) for _ in range(net.blocks)
        )
        self.head = nn.Linear(net.width, net.vocabulary, bias=False)
        self.register_buffer("scale", torch.tensor(1.5))
        if net.tied:
            self.head.weight = self.embedding.weight
        if net.frozen == "block":
            self.blocks[-1].requires_grad_(False)
        elif net.frozen == "parts":
            for block in self.blocks:
                block.get_submodule("up").requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) * self.scale
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


@dataclass(frozen=True, slots=True)
class Net:
    """A network as plain data; no world size from 2 to 4 divides the default's parameters.

    frozen: "" for nothing, "block" for the last block, "parts" for a layer of every block.
    nested: every block holds another one.
    """

    width: int = 5
    hidden: int = 7
    blocks: int = 2
    vocabulary: int = 10
    tied: bool = False
    frozen: str = ""
    nested: bool = False
    dtype: str = "float64"

    def make(self, seed: int = 0, device: torch.device | None = None) -> Network:
        """The network with the same parameters in every process."""
        with seeded_generator(seed):
            network = Network(self)
        return network.to(dtype=dtype_named(self.dtype), device=device)

    def batch(self, rank: int, number: int) -> tuple[Tensor, Tensor]:
        """Tokens and labels; they differ between ranks and batches, in their number too."""
        generator = torch.Generator().manual_seed(1000 * number + 17 * rank + 1)
        shape = (1 + (rank + number) % 3, 3)
        tokens, labels = (
            torch.randint(0, self.vocabulary, shape, generator=generator) for _ in range(2)
        )
        return tokens, labels

    def loss(self, model: nn.Module, rank: int, number: int, device: torch.device) -> Tensor:
        """What a model makes of one batch of one rank."""
        tokens, labels = self.batch(rank, number)
        logits = model(tokens.to(device))
        return nn.functional.cross_entropy(
            logits.float().flatten(0, 1) if self.dtype == "float32" else logits.flatten(0, 1),
            labels.to(device).flatten(),
        )


def units_of(net: Net, world_size: int, orig: bool = False) -> list[FlatSizes]:
    """Sizes of the root's flat parameter and of each block's."""
    network = net.make()
    groups: list[list[int]] = [[] for _ in range(net.blocks + 1)]
    for name, param in network.named_parameters():
        index = int(name.split(".")[1]) + 1 if name.startswith("blocks.") else 0
        groups[index].append(param.numel())
    itemsize = network.scale.element_size()
    return [flat_sizes(g, world_size, itemsize=itemsize, orig=orig) for g in groups]

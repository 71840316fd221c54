"""Models for the DDP and FSDP benchmarks: many small parameters, few large ones, a transformer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

SMALL_COUNT = 300
SMALL_NUMEL = 1024  # 4 KiB of float32
LARGE_COUNT = 8
LARGE_WIDTH = 1024  # a weight of 4 MiB
TRANSFORMER_LAYERS = 12
TRANSFORMER_WIDTH = 256
TRANSFORMER_TOKENS = 16


class ManySmall(nn.Module):
    """300 tensors of 4 KiB, each used once."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList(
            torch.full((SMALL_NUMEL,), 1 + 1e-3 * i) for i in range(SMALL_COUNT)
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([x * scale for scale in self.scales]).sum(0)


class FewLarge(nn.Module):
    """Linear layers of 4 MiB."""

    def __init__(self, count: int = LARGE_COUNT) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(LARGE_WIDTH, LARGE_WIDTH, bias=False) for _ in range(count)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Transformer(nn.Module):
    """12 layers, about 9.5 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                TRANSFORMER_WIDTH, 4, 4 * TRANSFORMER_WIDTH, dropout=0.0, batch_first=True
            )
            for _ in range(TRANSFORMER_LAYERS)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@dataclass(frozen=True, slots=True)
class Model:
    """How to make a model and its input. layer: the modules by which FSDP wraps it."""

    make: Callable[[], nn.Module]
    input_shape: tuple[int, ...]
    layer: type[nn.Module]


MODELS = {
    "many small": Model(ManySmall, (SMALL_NUMEL,), ManySmall),
    "medium": Model(
        Transformer, (1, TRANSFORMER_TOKENS, TRANSFORMER_WIDTH), nn.TransformerEncoderLayer
    ),
    "few large": Model(FewLarge, (4, LARGE_WIDTH), nn.Linear),
    "64 MiB": Model(partial(FewLarge, 16), (4, LARGE_WIDTH), nn.Linear),
}

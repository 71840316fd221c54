"""A small character-level language model, and the text that it learns, which a grammar makes.

Used by the training run; nothing in it knows how it is run, alone or in parallel.
"""

from __future__ import annotations

import random

import torch
from torch import Tensor, nn
from torch.nn import functional

CONTEXT = 32  # characters that the model sees
WIDTH = 48
LAYERS = 2
HEADS = 4
TEXT_LENGTH = 100_000
BATCH = 8  # samples a step, of all ranks together

_NOUNS = ["rank", "bucket", "gradient", "tensor", "group", "backend", "parameter", "buffer"]
_VERBS = ["sends", "averages", "shards", "gathers", "waits for", "broadcasts", "reduces"]
_ADJECTIVES = ["small", "large", "sparse", "frozen", "unused", "asynchronous", "late", "ready"]
_ENDINGS = [". ", ", and ", "; then ", " because "]


def make_text(length: int = TEXT_LENGTH, seed: int = 0) -> str:
    """Sentences about distributed training; the same for the same seed."""
    chooser = random.Random(seed)
    parts: list[str] = []
    size = 0
    while size < length:
        subject, verb, thing = (chooser.choice(words) for words in (_NOUNS, _VERBS, _NOUNS))
        quality = chooser.choice(_ADJECTIVES)
        clause = f"the {quality} {subject} {verb} {chooser.randrange(2, 9)} {thing}s"
        parts.append(clause + chooser.choice(_ENDINGS))
        size += len(parts[-1])
    return "".join(parts)[:length]


def encode(text: str) -> tuple[Tensor, list[str]]:
    """The text as numbers, (length,) int64, and the alphabet that they count."""
    alphabet = sorted(set(text))
    place = {character: i for i, character in enumerate(alphabet)}
    return torch.tensor([place[character] for character in text]), alphabet


def batch(text: Tensor, step: int, part: int = 0, parts: int = 1) -> tuple[Tensor, Tensor]:
    """One part of a step's samples: what is seen and what comes next, (BATCH / parts, CONTEXT)."""
    generator = torch.Generator().manual_seed(1000 + step)
    starts = torch.randint(len(text) - CONTEXT - 1, (BATCH,), generator=generator)
    windows = torch.stack([text[s : s + CONTEXT + 1] for s in starts.tolist()[part::parts]])
    return windows[:, :-1], windows[:, 1:]


class Block(nn.Module):
    """A transformer layer that looks back only."""

    def __init__(self) -> None:
        super().__init__()
        self.before_attention = nn.LayerNorm(WIDTH)
        self.attention = nn.Linear(WIDTH, 3 * WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.before_layers = nn.LayerNorm(WIDTH)
        self.layers = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        count, length, _ = x.shape
        qkv = self.attention(self.before_attention(x)).view(count, length, 3, HEADS, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        looked = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.mix(looked.transpose(1, 2).reshape(count, length, WIDTH))
        return x + self.layers(self.before_layers(x))  # type: ignore[no-any-return]  # a Tensor


class CharacterModel(nn.Module):
    """Predicts the next character at each place."""

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(characters, WIDTH)
        self.places = nn.Parameter(torch.randn(CONTEXT, WIDTH) / 10)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.last = nn.LayerNorm(WIDTH)
        self.predict = nn.Linear(WIDTH, characters)

    def forward(self, seen: Tensor) -> Tensor:
        """Scores, (samples, CONTEXT, characters), from characters, (samples, CONTEXT)."""
        x = self.blocks(self.characters(seen) + self.places)
        scores: Tensor = self.predict(self.last(x))
        return scores


def loss_of(scores: Tensor, following: Tensor) -> Tensor:
    """Mean over all places of the surprise at the next character, in nats."""
    return functional.cross_entropy(scores.flatten(0, 1), following.flatten())

"""How a case of a checkpoint is run: one function a rank, with a folder that all ranks share."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from conformance import Me

# What a rank finds wrong, one text each; nothing if all is right.
Fact = Callable[[Me, str], list[str]]


def save(state: dict[str, Any], folder: object, **how: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what is overwritten, and of shards of FSDP1
        return dcp.save(state, checkpoint_id=str(folder), **how)


def load(state: dict[str, Any], folder: object, **how: Any) -> dict[str, Any]:
    """The state, into which was loaded."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=str(folder), **how)
    return state


def raised(call: Callable[[], Any]) -> str:
    """What the call says when it fails, on whichever rank; in parentheses if it does not fail, or
    in another way than checkpoints do."""
    try:
        value = call()
    except dcp.api.CheckpointException as error:
        return str(error)
    except Exception as error:
        return f"({type(error).__name__}: {error})"
    return f"(nothing was raised, it returned {value!r})"


def unsaid(what: str, said: str, *words: str) -> list[str]:
    """What is found where a text of `raised` is in parentheses, or lacks one of these words."""
    is_enough = not said.startswith("(") and all(word in said for word in words)
    return [] if is_enough else [f"{what}: {said}"]


def numbers(size: tuple[int, ...], start: int = 0) -> Tensor:
    """Consecutive numbers in float32."""
    return torch.arange(start, start + torch.Size(size).numel(), dtype=torch.float32).view(size)

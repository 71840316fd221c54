"""Marks cases that need a newer torch; with an older one they are not exercised."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
from torch.nn.parallel import DistributedDataParallel


def takes(function: Callable[..., Any], argument: str) -> bool:
    """Whether this torch's function has the argument."""
    return argument in inspect.signature(function).parameters


def needs_argument(function: Callable[..., Any], argument: str) -> pytest.MarkDecorator:
    """The mark of a case that gives torch's function this argument."""
    # in a rank, the target may have put something without a name in its place
    name = getattr(function, "__name__", "function")
    reason = f"this torch's {name} has no {argument}"
    return pytest.mark.skipif(not takes(function, argument), reason=reason)


def needs_method(cls: type, method: str) -> pytest.MarkDecorator:
    """The mark of a case that calls this method of torch's class."""
    reason = f"this torch's {cls.__name__} has no {method}"
    return pytest.mark.skipif(not hasattr(cls, method), reason=reason)


has_batched_grad_copy = takes(DistributedDataParallel, "batched_grad_copy")
needs_batched_grad_copy = needs_argument(DistributedDataParallel, "batched_grad_copy")
needs_forward_sync_buffers = needs_argument(DistributedDataParallel, "forward_sync_buffers")

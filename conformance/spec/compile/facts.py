"""The compiler as it is in a new process, and what compiled functions do beside the same eager."""

from __future__ import annotations

import contextlib
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._dynamo as dynamo
from torch import Tensor
from torch._dynamo.utils import CleanupManager

from conformance import Me
from conformance.spec.facts import unlike

BACKENDS = ("eager", "aot_eager")


@contextlib.contextmanager
def compiler(**settings: Any) -> Iterator[None]:
    """Dynamo with these settings, and with nothing compiled yet; nothing stays either."""
    logger = logging.getLogger("torch")
    level = logger.level
    dynamo.reset()
    try:
        logger.setLevel(logging.ERROR)
        with dynamo.config.patch(settings), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # where the compiler gives up; that it may
            yield
    finally:
        logger.setLevel(level)
        dynamo.reset()
        _forget_graphs()


def _forget_graphs() -> None:
    """Dynamo leaves graphs, and groups with them, where the functions that it compiled look for
    names: in modules, and for a backward in a dictionary that it never lets go."""
    kept = list(CleanupManager.instance.values.values())
    of_backwards = [hook.scope for hooks in kept for hook in hooks]
    of_modules = [getattr(module, "__dict__", {}) for module in list(sys.modules.values())]
    for names in [*of_modules, *of_backwards]:
        for graph in [name for name in names if name.startswith("__compiled_fn")]:
            del names[graph]


def compiled(function: Any, backend: Any) -> Any:
    return torch.compile(function, backend=backend)


def mine(me: Me, *size: int, seed: int = 0) -> Tensor:
    """Small whole numbers, so that sums are exact; each rank has its own."""
    generator = torch.Generator().manual_seed(10 * seed + me.rank)
    return torch.randint(-3, 4, size or (4, 4), generator=generator).float().to(me.device)


def settled(result: Any) -> Any:
    """On the host, waited for; of containers each value."""
    if isinstance(result, list | tuple):
        return [settled(value) for value in result]
    return (result.detach() + 0).cpu() if isinstance(result, Tensor) else result


def unlike_eager(function: Callable[..., Any], *args: Any) -> list[str]:
    """What the compiled function does otherwise: what it returns, and to the tensors that it is
    given."""
    found: list[str] = []
    want_args, want = _called(function, args)
    for backend in BACKENDS:
        with compiler():
            got_args, got = _called(compiled(function, backend), args)
        found += unlike(f"result with {backend}", settled(got), settled(want))
        found += unlike(f"input after {backend}", settled(got_args), settled(want_args))
    return found


def _called(function: Callable[..., Any], args: Any) -> tuple[Any, Any]:
    given = [arg.clone() if isinstance(arg, Tensor) else arg for arg in args]
    return given, function(*given)

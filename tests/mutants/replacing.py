"""Base classes for mutants that replace handles or functions of torch.distributed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch.distributed import distributed_c10d

from tests.mutants.kit import Patch


class Wrapped:
    """A handle that hands everything to another one; a mutant overrides what it breaks."""

    def __init__(self, work: Any) -> None:
        self.work = work

    def __getattr__(self, name: str) -> Any:
        return getattr(self.work, name)


class Finished:
    """A handle of something that was over at once, whatever may be the matter."""

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


@contextmanager
def replaced(**wrappers: Callable[[Any], Any]) -> Iterator[None]:
    """While this lasts, functions of `torch.distributed` are others.

    wrappers: name -> what makes the new function from the old one.
    """
    with ExitStack() as stack:
        for name, wrap in wrappers.items():
            owners = [module for module in (distributed_c10d, dist) if hasattr(module, name)]
            new = wrap(getattr(owners[0], name))
            for module in owners:
                stack.enter_context(mock.patch.object(module, name, new))
        yield


class Replacing(Patch):
    """Each static method of a mutant takes the place of the function of `torch.distributed` that
    has its name. Its first argument is the right function."""

    @classmethod
    @contextmanager
    def patched(cls) -> Iterator[None]:
        wrong = {n: f.__func__ for n, f in vars(cls).items() if isinstance(f, staticmethod)}
        with replaced(**{name: partial(partial, function) for name, function in wrong.items()}):
            yield

"""Base classes for mutants that replace handles, functions or methods of torch."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from datetime import timedelta
from functools import partial, wraps
from typing import Any, ClassVar
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


def owner_named(reference: str) -> Any:
    """The module, or the class of a module."""
    module, _, name = reference.partition(":")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some modules warn of what they use
        found = importlib.import_module(module)
    return getattr(found, name) if name else found


@contextmanager
def methods_replaced(reference: str, wrong: dict[str, Callable[..., Any]]) -> Iterator[None]:
    """While this lasts, methods (or functions) are others; each has the right one as its first
    argument."""
    owner = owner_named(reference)

    def instead(right: Any, function: Callable[..., Any]) -> Any:
        # with the signature of the right one, at which torch looks now and then
        return wraps(right)(lambda *args, **kwargs: function(right, *args, **kwargs))

    with ExitStack() as stack:
        for name, function in wrong.items():
            new: Any = instead(getattr(owner, name), function)
            if isinstance(vars(owner).get(name), staticmethod):
                new = staticmethod(new)
            stack.enter_context(mock.patch.object(owner, name, new))
        yield


class MethodMutant(Patch):
    """Each static method of a mutant takes the place of the method of `of` that has its name. Its
    first argument is the right method.

    repaired: puts right what torch does otherwise than the rules have it.
    """

    of: ClassVar[str]
    repaired: ClassVar[Callable[[], AbstractContextManager[Any]]] = nullcontext

    @classmethod
    @contextmanager
    def patched(cls) -> Iterator[None]:
        wrong = {n: f.__func__ for n, f in vars(cls).items() if isinstance(f, staticmethod)}
        wrong.pop("repaired", None)
        with cls.repaired(), methods_replaced(cls.of, wrong):
            yield

"""Mutants of conformance/spec/collectives/pending_results.py."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed import _functional_collectives as functional

from tests.mutants.collectives.functional import Functional
from tests.mutants.collectives.kit import Repaired
from tests.mutants.kit import Patch, breaks
from tests.mutants.replacing import MethodMutant

PENDING = "torch.distributed._functional_collectives:AsyncCollectiveTensor"


class PendingMutant(MethodMutant):
    """A method of AsyncCollectiveTensor is another one, in code that is otherwise mended."""

    of = PENDING
    repaired = Repaired.patched


@breaks("functional/pending/touched", says="numpy: ")
class NumpyDoesNotWait(PendingMutant):
    @staticmethod
    def numpy(right: Any, self: Any) -> Any:
        return self.elem.numpy()


@breaks("functional/pending/touched", says="repr: calls that are still to be waited for")
class ReprDoesNotWait(PendingMutant):
    @staticmethod
    def __repr__(right: Any, self: Any) -> str:
        return f"AsyncCollectiveTensor({self.elem})"


def _is_a_list(x: Any) -> bool:
    return isinstance(x, list | tuple)


class DispatchMutant(Patch):
    """Operators of pending results go through `wrong`, whose first argument is the right way."""

    @staticmethod
    def wrong(right: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError

    @classmethod
    @contextmanager
    def patched(cls) -> Iterator[None]:
        owner: Any = functional.AsyncCollectiveTensor
        kept = vars(owner)["__torch_dispatch__"]
        right = owner.__torch_dispatch__

        def instead(_: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return cls.wrong(right, func, types, args, kwargs)

        with Repaired.patched():
            owner.__torch_dispatch__ = classmethod(instead)
            try:
                yield
            finally:
                owner.__torch_dispatch__ = kept


@breaks("functional/pending/touched", says=r"(cat|stack|foreach): ")
class ListsAreNotWaitedFor(DispatchMutant):
    """Pending results in a list are taken as they are."""

    @staticmethod
    def wrong(right: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if args and _is_a_list(args[0]) and isinstance(args[0][0], torch.Tensor):
            args = ([getattr(x, "elem", x) for x in args[0]], *args[1:])
            return func(*args, **(kwargs or {}))
        return right(func, types, args, kwargs)


@breaks("functional/pending/views", says=r"\w+: calls that are not waited for: got 0, want 1")
class ViewsWait(DispatchMutant):
    @staticmethod
    def wrong(right: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(args[0], functional.AsyncCollectiveTensor):
            args[0].trigger_wait()
        return right(func, types, args, kwargs)


@breaks("functional/pending/modes", says="another thread: ")
class OtherThreadsReadZeros(DispatchMutant):
    @staticmethod
    def wrong(right: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = right(func, types, args, kwargs)
        if threading.current_thread() is threading.main_thread():
            return found
        return found * 0 if isinstance(found, torch.Tensor) else found


@breaks("functional/pending/waited-once", says="what was written: ")
class EachWaitFetchesTheResult(PendingMutant):
    """A wait copies the result that came, also when it was fetched before."""

    @staticmethod
    def trigger_wait(right: Any, self: Any) -> Any:
        found = right(self)
        if not hasattr(self, "kept"):
            self.kept = found.clone()
        return found.copy_(self.kept) if self.numel() == 6 else found


@breaks("functional/pending/saved", says="pickle: calls that are still to be waited for")
@breaks("functional/pending/dropped", says="a dropped result keeps its memory")
class HasTorchsFaults(Patch):
    @classmethod
    @contextmanager
    def patched(cls) -> Iterator[None]:
        yield


@breaks("functional/pending/exported", says="from_dlpack: ")
class ExportsTheInput(PendingMutant):
    """What is exported has not been waited for, and is changed at once."""

    @staticmethod
    def __dlpack__(right: Any, self: Any, **how: Any) -> Any:
        return (self.trigger_wait() * 0).__dlpack__(**how)


@breaks("functional/pending/any-order", says="result: ")
class ReducesResultsInTheirOwnMemory(Functional):
    """A pending result that is reduced again holds the new result."""

    base = "impl"

    @staticmethod
    def all_reduce(right: Any, x: Any, *args: Any) -> Any:
        if not isinstance(x, functional.AsyncCollectiveTensor):
            return right(x, *args)
        result = functional.wait_tensor(right(x, *args))
        return x.copy_(result)

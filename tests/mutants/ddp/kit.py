"""How mutants of DDP are written: impl's DDP with one function replaced."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, ClassVar
from unittest import mock

from impl.ddp.buckets.bucket import Bucket
from impl.ddp.iteration.reducer import Reducer
from impl.ddp.iteration.reduction import BucketReduction
from impl.ddp.wrapper.api import DistributedDataParallel
from tests.mutants.kit import Patch


class DDPMutant(Patch):
    """A mutant in impl's DDP, on impl's backend."""

    base: ClassVar[str] = "impl"


def swap(
    owner: Any, name: str, make: Callable[[Any], Any]
) -> Callable[[], AbstractContextManager[None]]:
    """The context in which `owner.name` is what `make` makes of it. For `patched`.

    owner: a module or a class.
    make: from the right function to the wrong one.
    """

    def patched() -> Any:
        return mock.patch.object(owner, name, make(getattr(owner, name)))

    return staticmethod(patched)


def instead(
    owner: Any, name: str, wrong: Callable[..., Any]
) -> Callable[[], AbstractContextManager[None]]:
    """As `swap`, with a function that does not need the right one."""
    return swap(owner, name, lambda _: wrong)


def afterwards(
    owner: Any, name: str, then: Callable[..., Any]
) -> Callable[[], AbstractContextManager[None]]:
    """As `swap`: the right function, and then `then` with the same arguments."""

    def make(right: Any) -> Any:
        def both(*args: Any, **kwargs: Any) -> Any:
            result = right(*args, **kwargs)
            then(*args, **kwargs)
            return result

        return both

    return swap(owner, name, make)


def beforehand(
    owner: Any, name: str, first: Callable[..., Any]
) -> Callable[[], AbstractContextManager[None]]:
    """As `swap`: `first` with the same arguments, and then the right function."""

    def make(right: Any) -> Any:
        def both(*args: Any, **kwargs: Any) -> Any:
            first(*args, **kwargs)
            return right(*args, **kwargs)

        return both

    return swap(owner, name, make)


def together(
    *parts: Callable[[], AbstractContextManager[None]],
) -> Callable[[], AbstractContextManager[None]]:
    """The context of several replacements that make one mutant."""

    @contextmanager
    def patched() -> Iterator[None]:
        with ExitStack() as stack:
            for part in parts:
                stack.enter_context(part())
            yield

    return staticmethod(patched)


def replace(change: Any) -> Any:
    """After each reduction gradients are replaced."""

    def then(reduction: BucketReduction, bucket: Bucket) -> None:
        for param in bucket.params:
            if param.grad is not None:
                param.grad = change(param.grad)

    return afterwards(BucketReduction, "deliver", then)


def forget(reducer: Reducer, *_: Any) -> None:
    for param in reducer.params:
        param.grad = None


def constructor(change: Any) -> Any:
    """Another constructor: `change(right)`."""
    return swap(DistributedDataParallel, "__init__", change)

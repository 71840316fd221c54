"""Mutants of conformance/spec/groups/backends.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, ClassVar
from unittest import mock

import torch
import torch.distributed as dist

from tests.mutants.kit import Patch, breaks
from tests.mutants.replacing import Replacing


@breaks("backends/name", says=r"rank 0 is wrong\nat \[1\]")
@breaks("groups/backend-name", says=r"get_backend is 'custom', want 'gloo'")
class BackendIsCalledCustom(Replacing):
    @staticmethod
    def get_backend(right: Any, group: Any = None) -> str:
        right(group)
        return "custom"


@breaks("backends/registered", says=r"rank 0 is wrong\nat \[2\]: got False, want True")
class BackendNamesAreCaseSensitive(Replacing):
    """A backend is available under the very name that it was registered by."""

    @staticmethod
    def is_backend_available(right: Any, backend: str) -> bool:
        return bool(right(backend)) and backend == backend.lower()


@breaks("backends/target-is-available", says=r"'pygloo' is not available")
class OnlyTorchsOwnAreAvailable(Replacing):
    """A backend is available when torch was built with it."""

    base: ClassVar[str] = "impl"

    @staticmethod
    def is_backend_available(right: Any, backend: str) -> bool:
        return bool(right(backend)) and backend.upper() not in dist.Backend._plugins


class _ChangesCreators(Patch):
    """Registering a creator registers another one in its place."""

    @staticmethod
    def changed(creator: Callable[..., Any]) -> Callable[..., Any]:
        raise NotImplementedError

    @classmethod
    @contextmanager
    def patched(cls) -> Iterator[None]:
        right = dist.Backend.register_backend

        def register(name: str, creator: Any, *args: Any, **how: Any) -> None:
            right(name, cls.changed(creator), *args, **how)

        with mock.patch.object(dist.Backend, "register_backend", register):
            yield


@breaks("backends/creator-arguments", says=r"rank 1 is wrong\nat \[1\]\[0\]: got 1, want 0")
class CreatorsGetGlobalRanks(_ChangesCreators):
    @staticmethod
    def changed(creator: Callable[..., Any]) -> Callable[..., Any]:
        def create(store: Any, rank: int, *rest: Any) -> Any:
            return creator(store, dist.get_rank() if dist.is_initialized() else rank, *rest)

        return create


@breaks("backends/extended-creator-arguments", says=r"got NoneType None")
class OptionsAreForTheDefaultGroup(_ChangesCreators):
    """A creator gets no options if there is already a default group."""

    @staticmethod
    def changed(creator: Callable[..., Any]) -> Callable[..., Any]:
        def create(given: Any, options: Any) -> Any:
            return creator(given, None if dist.is_initialized() else options)

        return create


@breaks("backends/default-timeout", says=r"rank 0 is wrong\nat \[0\]: got 600\.0, want 1800\.0")
class DefaultTimeoutIsTenMinutes(Replacing):
    """Every backend has the default timeout of NCCL."""

    @staticmethod
    def _get_default_timeout(right: Any, backend: Any) -> timedelta:
        return timedelta(minutes=10)


@breaks("backends/config-strings", says="DID NOT RAISE ValueError")
class AcceptsATrailingComma(Replacing):
    @staticmethod
    def BackendConfig(right: Any, backend: str) -> Any:  # noqa: N802  # torch's name
        return right(backend.rstrip(","))


@breaks("backends/dispatch", says=r"at \[1\]\[4\]: got 'allreduce', want 'barrier'")
class BarriersAreReductions(Replacing):
    """A barrier is a reduction of one element."""

    @staticmethod
    def barrier(right: Any, group: Any = None, *args: Any, **how: Any) -> Any:
        return dist.all_reduce(torch.zeros(1), group=group)

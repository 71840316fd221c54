"""Mutants of conformance/spec/groups/abort_hooks.py."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from impl.gloo import ProcessGroupGloo
from impl.gloo.requests import call_hooks
from tests.mutants.kit import Patch, breaks
from tests.mutants.replacing import MethodMutant


class AbortHookMutant(MethodMutant):
    """`impl`, whose groups call abort hooks otherwise."""

    base = "impl"
    of = f"{call_hooks.__name__}:AbortHooks"


@breaks("abort_hooks/said", says="supported: False; register_abort_hook: no error")
class DeniesItsHooks(Patch):
    base = "impl"

    @classmethod
    @contextmanager
    def patched(cls) -> Iterator[None]:
        with mock.patch.object(ProcessGroupGloo, "supports_abort_hooks", False):
            yield


@breaks("abort_hooks/when-a-call-fails", says=r"rank 0 is wrong\ngot 1 values, want 2")
class CallsNoHooks(AbortHookMutant):
    @staticmethod
    def call(right: Any, hooks: Any) -> None:
        pass


@breaks("abort_hooks/by-number", says=r"rank 0 is wrong\ngot 4 values, want 3")
class KeepsHooks(AbortHookMutant):
    """A hook that was registered is never taken away."""

    @staticmethod
    def put(right: Any, hooks: Any, number: int, hook: Any) -> None:
        if hook is not None:
            right(hooks, number, hook)


@breaks("abort_hooks/without-a-failure", says="got 2 values, want 1")
class TakesTheEndForAFailure(MethodMutant):
    base = "impl"
    of = f"{ProcessGroupGloo.__module__}:{ProcessGroupGloo.__name__}"

    @staticmethod
    def shutdown(right: Any, group: Any) -> None:
        group._abort_hooks.call()
        right(group)

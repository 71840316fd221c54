"""Handles (`Work`) for mutants: done at once, relaying another, never completed, acting late."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


class Done(dist.Work):
    """Of an operation that was over when it was issued."""

    def __init__(self) -> None:
        super().__init__()

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def exception(self) -> Any:
        return None

    def get_future(self) -> Any:
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        future.set_result([])
        return future


class Relayed(dist.Work):
    """Says what another one says; a mutant overrides one answer."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def wait(self, timeout: timedelta | None = None) -> bool:
        done: bool = self.inner.wait() if timeout is None else self.inner.wait(timeout)
        return done

    def is_completed(self) -> bool:
        completed: bool = self.inner.is_completed()
        return completed

    def is_success(self) -> bool:
        succeeded: bool = self.inner.is_success()
        return succeeded

    def exception(self) -> Any:
        return self.inner.exception()

    def result(self) -> Any:
        return self.inner.result()

    def get_future(self) -> Any:
        return self.inner.get_future()


class NeverCompleted(Relayed):
    """Its operation is done, and is_completed stays False."""

    def is_completed(self) -> bool:
        return False


class After(Relayed):
    """Does something more once its operation is done, and once only."""

    def __init__(self, inner: Any, then: Callable[[], None]) -> None:
        super().__init__(inner)
        self._then: Callable[[], None] | None = then

    def _finish(self) -> None:
        then, self._then = self._then, None
        if then is not None:
            then()

    def wait(self, timeout: timedelta | None = None) -> bool:
        done = super().wait(timeout)
        self._finish()
        return done

    def is_completed(self) -> bool:
        completed = super().is_completed()
        if completed:
            self._finish()
        return completed

    def get_future(self) -> Any:
        def finish(future: Any) -> Any:
            self._finish()
            return future.value()

        return super().get_future().then(finish)

"""Work handles from which mutants derive: one that is done at once, one that relays another."""

from __future__ import annotations

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

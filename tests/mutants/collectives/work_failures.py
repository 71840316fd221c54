"""Mutants of conformance/spec/collectives/work_failures.py."""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch

from tests.mutants.collectives.kit import Relaying
from tests.mutants.handles import Relayed
from tests.mutants.kit import breaks


@breaks("work/wait-after-timeout", says=r"rank 0 is wrong[\s\S]*got nan, want 2\.0")
class CannotBeWaitedForAfterATimeout(Relaying):
    class handle(Relayed):  # noqa: N801
        error: RuntimeError | None = None

        def wait(self, timeout: timedelta | None = None) -> bool:
            if self.error is not None:
                raise self.error
            try:
                return super().wait(timeout)
            except RuntimeError as error:
                self.error = error
                raise


@breaks("work/wait-timeout", says=r"wait ended with 'returned'")
class WaitReturnsAtItsTimeout(Relaying):
    class handle(Relayed):  # noqa: N801
        def wait(self, timeout: timedelta | None = None) -> bool:
            try:
                return super().wait(timeout)
            except RuntimeError:
                return False


@breaks("work/failure-is-told", says=r"exception is 'None'")
class NeverHasAnException(Relaying):
    class handle(Relayed):  # noqa: N801
        def exception(self) -> Any:
            return None


@breaks("work/failed-future", says=r"the future is not done although the collective had failed")
class FuturesOfFailuresNeverEnd(Relaying):
    class handle(Relayed):  # noqa: N801
        def get_future(self) -> Any:
            future: torch.futures.Future[Any] = torch.futures.Future()

            def pass_on(done: torch.futures.Future[Any]) -> None:
                with suppress(RuntimeError):
                    future.set_result(done.value())

            super().get_future().add_done_callback(pass_on)
            return future


@breaks("work/group-timeout", says=r"wait ended with 'returned'")
@breaks("work/peer-gone", says=r"wait ended well without the last rank")
class WaitHidesFailures(Relaying):
    class handle(Relayed):  # noqa: N801
        def wait(self, timeout: timedelta | None = None) -> bool:
            try:
                return super().wait(timeout)
            except RuntimeError:
                return True

"""Mutants of conformance/spec/collectives/threads.py."""

from __future__ import annotations

import threading
from typing import Any, ClassVar

from tests.mutants.kit import ForwardingGroup, breaks


@breaks("order/threads-of-several-groups", says=r"(all_reduce|broadcast).*: rank \d is wrong")
class OneCollectiveAtATime(ForwardingGroup):
    """A lock of all groups is held for as long as a collective lasts."""

    lock: ClassVar[threading.Lock] = threading.Lock()

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        with self.lock:
            work = super().allreduce(tensors, opts)
            work.wait()
            return work

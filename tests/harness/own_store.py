"""A target whose store is written in Python and has little more than it must."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from conformance.capabilities import Capabilities
from conformance.target import Target


class DictStore(dist.Store):
    """Values of one process, in a dictionary."""

    def __init__(self, timeout: timedelta) -> None:
        super().__init__()
        self.held: dict[str, bytes] = {}
        self.changed = threading.Condition()
        self.set_timeout(timeout)

    def set_timeout(self, timeout: timedelta) -> None:
        super().set_timeout(timeout)
        self.patience = timeout

    def set(self, key: str, value: Any) -> None:
        with self.changed:
            self.held[key] = value.encode() if isinstance(value, str) else bytes(value)
            self.changed.notify_all()

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self.held[key]

    def add(self, key: str, amount: int) -> int:
        with self.changed:
            total = int(self.held.get(key, b"0")) + amount
            self.set(key, str(total))
            return total

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        with self.changed:
            if key not in self.held and expected:
                return expected.encode()
            if self.held.get(key, b"") == expected.encode():
                self.set(key, desired)
            return self.held[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.held for key in keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        within_s = (timeout or self.patience).total_seconds()
        with self.changed:
            if not self.changed.wait_for(lambda: self.check(keys), within_s):
                missing = [key for key in keys if key not in self.held]
                raise dist.DistStoreError(f"timeout: {missing}")


def make(timeout: timedelta, **_: Any) -> DictStore:
    return DictStore(timeout)


TARGET = Target(
    name="dict-store",
    backend="gloo",
    fully_shard="",
    store=f"{__name__}:make",
    capabilities=Capabilities(features=frozenset()),
)

"""Mutants of conformance/spec/stores/sharing.py."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any

from tests.mutants.kit import breaks
from tests.mutants.stores.kit import StoreMutant


@breaks("store/seen-by-all", says="values")
class GetsItsOwnValue(StoreMutant):
    def get(self, key: str) -> bytes:
        found: bytes = self.inner.get(f"of/{self.rank}")
        return found


@breaks("store/newest-for-all", says="value of rank 1")
class RemembersWhatItGot(StoreMutant):
    def __init__(self, inner: Any, rank: int) -> None:
        super().__init__(inner, rank)
        self.seen: dict[str, bytes] = {}

    def get(self, key: str) -> bytes:
        if key not in self.seen:
            self.seen[key] = self.inner.get(key)
        return self.seen[key]


@breaks("store/deleted-for-all", says="returned, is there")
class DeletesForItselfAlone(StoreMutant):
    def __init__(self, inner: Any, rank: int) -> None:
        super().__init__(inner, rank)
        self.deleted: set[str] = set()

    def delete_key(self, key: str) -> bool:
        self.deleted.add(key)
        return True

    def check(self, keys: list[str]) -> bool:
        return self.deleted.isdisjoint(keys) and bool(self.inner.check(keys))


@breaks("store/added-by-all", says="sum of all")
@breaks("store/each-sum-once", says="each number was taken")
@breaks("store/threads", says="sum")
class AddsInTwoSteps(StoreMutant):
    def add(self, key: str, amount: int) -> int:
        total = int(self.inner.get(key)) if self.inner.check([key]) else 0
        time.sleep(0.001)
        self.inner.set(key, str(total + amount))
        return total + amount


@breaks("store/counted-barrier", says="ranks that arrived")
class CountsOneTooMany(StoreMutant):
    def add(self, key: str, amount: int) -> int:
        return int(self.inner.add(key, amount)) + amount


@breaks("store/one-wins", says="what compare_set returned is the value")
class LetsEveryoneWin(StoreMutant):
    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        self.inner.compare_set(key, expected, desired)
        return desired.encode()


@breaks("store/appended-by-all", says="whole pieces of each rank")
class AppendsInTwoSteps(StoreMutant):
    def append(self, key: str, value: str) -> None:
        before = self.inner.get(key) if self.inner.check([key]) else b""
        time.sleep(0.001)
        self.inner.set(key, before + value.encode())


@breaks("store/large-at-once", says="are what the other rank set")
class EndsLargeValuesWithAZero(StoreMutant):
    def set(self, key: str, value: str) -> None:
        self.inner.set(key, value if len(value) < 1 << 20 else value[:-1] + "x")


@breaks("store/popped-once", says="all that was popped")
class LeavesWhatItPops(StoreMutant):
    def queue_pop(self, key: str, block: bool = True) -> bytes:
        found: bytes = self.inner.queue_pop(key, block)
        self.inner.queue_push(key, found.decode())
        return found


@breaks("store/barrier", says="ranks that had come")
class PassesBarriers(StoreMutant):
    def barrier(self, key: str, world_size: int, timeout: timedelta) -> None:
        pass


@breaks("store/carries-a-group", says="RuntimeError: Unable to cast foreign type")
class IsNoStoreOfTorch(StoreMutant):
    """It has the methods, and is not derived from `torch.distributed.Store`."""


@breaks("store/clones-in-threads", says="thread 0: ")
class ClonesCannotWait(StoreMutant):
    def clone(self) -> Any:
        return Impatient(self.inner.clone(), self.rank)


class Impatient(StoreMutant):
    """Not registered: what the mutant above makes."""

    def wait(self, keys: list[str], *timeout: timedelta) -> None:
        self.inner.wait(keys, timedelta(milliseconds=1))
        raise RuntimeError("a clone does not wait")


@breaks("store/waits-alone", says="set took")
class DoesOneThingAtATime(StoreMutant):
    def __init__(self, inner: Any, rank: int) -> None:
        super().__init__(inner, rank)
        self.lock = threading.Lock()

    def get(self, key: str) -> bytes:
        with self.lock:
            found: bytes = self.inner.get(key)
            return found

    def set(self, key: str, value: str) -> None:
        with self.lock:
            self.inner.set(key, value)


@breaks("store/one-replaces", says="how often a rank has replaced the value")
class ComparesAndThenSets(StoreMutant):
    """A value that is there is compared here, and set in the store later."""

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        if not expected or self.inner.get(key) != expected.encode():
            found: bytes = self.inner.compare_set(key, expected, desired)
            return found
        time.sleep(0.002)
        self.inner.set(key, desired)
        return desired.encode()

"""Mutants of conformance/spec/stores/values.py."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch.distributed as dist

from tests.mutants.kit import breaks
from tests.mutants.stores.kit import StoreMutant


@breaks("store/set", says="values")
class KeepsTheFirstValue(StoreMutant):
    def set(self, key: str, value: Any) -> None:
        if not self.inner.check([key]):
            self.inner.set(key, value)


@breaks("store/any-bytes", says="values")
class CutsAtZeroBytes(StoreMutant):
    def set(self, key: str, value: Any) -> None:
        data = value.encode() if isinstance(value, str) else value
        self.inner.set(key, data.partition(b"\0")[0])


@breaks("store/empty-value", says="value, is there")
class StoresABlankForNothing(StoreMutant):
    def set(self, key: str, value: Any) -> None:
        self.inner.set(key, value or " ")


@breaks("store/any-key", says="values")
class FoldsTheCaseOfKeys(StoreMutant):
    def set(self, key: str, value: Any) -> None:
        self.inner.set(key.lower(), value)

    def get(self, key: str) -> bytes:
        found: bytes = self.inner.get(key.lower())
        return found


@breaks("store/one-mib", says="is what was set")
class CutsAtAMillionBytes(StoreMutant):
    def set(self, key: str, value: Any) -> None:
        self.inner.set(key, value[: 10**6])


@breaks("store/sixteen-mib", says="16 MiB: ValueError")
class RefusesMoreThanEightMiB(StoreMutant):
    def set(self, key: str, value: Any) -> None:
        if len(value) > 8 << 20:
            raise ValueError("too large")
        self.inner.set(key, value)


@breaks("store/add", says="sums, and as text")
class ReturnsTheSumBefore(StoreMutant):
    def add(self, key: str, amount: int) -> int:
        return int(self.inner.add(key, amount)) - amount


@breaks("store/add-nothing", says="sum, is there")
class AddsNoZero(StoreMutant):
    def add(self, key: str, amount: int) -> int:
        return int(self.inner.add(key, amount)) if amount else 0


@breaks("store/add-to-a-value", says="sum, as text")
@breaks("store/delete-forgets", says="sum")
class KeepsSumsBesideItsValues(StoreMutant):
    def __init__(self, inner: Any, rank: int) -> None:
        super().__init__(inner, rank)
        self.sums: Counter[str] = Counter()

    def add(self, key: str, amount: int) -> int:
        self.sums[key] += amount
        self.inner.set(key, str(self.sums[key]))
        return self.sums[key]


@breaks("store/add-large", says="sums")
class AddsIn32Bits(StoreMutant):
    def add(self, key: str, amount: int) -> int:
        return (int(self.inner.add(key, amount)) + 2**31) % 2**32 - 2**31


@breaks("store/add-to-text", says="nothing was raised")
class TakesTextForZero(StoreMutant):
    def add(self, key: str, amount: int) -> int:
        if self.inner.check([key]) and not self.inner.get(key).isdigit():
            self.inner.delete_key(key)
        return int(self.inner.add(key, amount))


@breaks("store/compare-set-new", says="returned, value")
@breaks("store/compare-set-equal", says="returned, value")
class ReturnsTheValueBefore(StoreMutant):
    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        before: bytes = self.inner.get(key) if self.inner.check([key]) else b""
        self.inner.compare_set(key, expected, desired)
        return before


@breaks("store/compare-set-unequal", says="returned, value")
@breaks("store/compare-set-missing", says="returned, is there")
class ComparesNothing(StoreMutant):
    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        self.inner.set(key, desired)
        return desired.encode()


@breaks("store/check", says="answers")
class ChecksForAnyKey(StoreMutant):
    def check(self, keys: list[str]) -> bool:
        return any(self.inner.check([key]) for key in keys)


@breaks("store/delete", says="returned, a, b, value of b")
class KeepsDeletedKeys(StoreMutant):
    def delete_key(self, key: str) -> bool:
        return bool(self.inner.check([key]))


@breaks("store/delete-nothing", says="returned of no key")
class DeletesNothingWithSuccess(StoreMutant):
    def delete_key(self, key: str) -> bool:
        self.inner.delete_key(key)
        return True


@breaks("store/num-keys", says="more, left")
class CountsDeletedKeys(StoreMutant):
    def __init__(self, inner: Any, rank: int) -> None:
        super().__init__(inner, rank)
        self.deleted = 0

    def delete_key(self, key: str) -> bool:
        self.deleted += 1
        return bool(self.inner.delete_key(key))

    def num_keys(self) -> int:
        return int(self.inner.num_keys()) + self.deleted


@breaks("store/list-keys", says="new keys")
class ListsTheFirstPartsOfKeys(StoreMutant):
    def list_keys(self) -> list[str]:
        return [key.partition("/")[0] for key in self.inner.list_keys()]


@breaks("store/append", says="values")
class AppendsNothingToNothing(StoreMutant):
    def append(self, key: str, value: str) -> None:
        self.inner.append(key, value if self.inner.check([key]) else "")


@breaks("store/multi", says="values")
class SortsTheKeysOfMultiGet(StoreMutant):
    def multi_get(self, keys: list[str]) -> list[bytes]:
        found: list[bytes] = self.inner.multi_get(sorted(keys))
        return found


@breaks("store/multi-set-of-unequal-lengths", says="nothing was raised")
class IgnoresKeysWithoutAValue(StoreMutant):
    def multi_set(self, keys: list[str], values: list[str]) -> None:
        for key, value in zip(keys, values, strict=False):
            self.inner.set(key, value)


@breaks("store/types", says="nothing was raised")
class TakesNumbersForTexts(StoreMutant):
    def set(self, key: Any, value: Any) -> None:
        self.inner.set(str(key), str(value))


@breaks("store/clone", says="values")
class ClonesAreNewStores(StoreMutant):
    def clone(self) -> dist.Store:
        return dist.HashStore()


@breaks("store/clone-timeout", says="timeout")
class ClonesForgetTheTimeout(StoreMutant):
    names_keys = True  # a clone of a HashStore is the same store

    def clone(self) -> Any:
        other = self.inner.clone()
        other.set_timeout(2 * self.inner.timeout)
        return other


class KeepsTheLastPartsOfKeys(dist.Store):
    """Of "one/key" it keeps "key"."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def set(self, key: str, value: Any) -> None:
        self.inner.set(key.rpartition("/")[2], value)

    def get(self, key: str) -> bytes:
        found: bytes = self.inner.get(key.rpartition("/")[2])
        return found

    def add(self, key: str, amount: int) -> int:
        return int(self.inner.add(key.rpartition("/")[2], amount))

    def check(self, keys: list[str]) -> bool:
        return bool(self.inner.check([key.rpartition("/")[2] for key in keys]))


@breaks("store/prefix", says="values, without a prefix")
class IgnoresPrefixes(StoreMutant):
    @classmethod
    def make(cls, **place: Any) -> Any:
        return KeepsTheLastPartsOfKeys(super().make(**place).inner)


@breaks("store/queue", says="values")
class PopsTheNewestFirst(StoreMutant):
    def queue_pop(self, key: str, block: bool = True) -> bytes:
        values: list[bytes] = [
            self.inner.queue_pop(key, block) for _ in range(self.inner.queue_len(key))
        ]
        for value in values[:-1]:
            self.inner.queue_push(key, value.decode())
        return values[-1]


@breaks("store/queue-length", says="lengths")
class CountsWhatWasPopped(StoreMutant):
    def __init__(self, inner: Any, rank: int) -> None:
        super().__init__(inner, rank)
        self.pushed: Counter[str] = Counter()

    def queue_push(self, key: str, value: str) -> None:
        self.pushed[key] += 1
        self.inner.queue_push(key, value)

    def queue_len(self, key: str) -> int:
        return self.pushed[key]


@breaks("store/queue-empty", says="nothing was raised")
class PopsNothingFromAnEmptyQueue(StoreMutant):
    def queue_pop(self, key: str, block: bool = True) -> bytes:
        if not block and not self.inner.queue_len(key):
            return b""
        found: bytes = self.inner.queue_pop(key, block)
        return found


@breaks("store/queues-apart", says="value of b, lengths")
class HasOneQueue(StoreMutant):
    def queue_push(self, key: str, value: str) -> None:
        self.inner.queue_push("queue", value)

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        found: bytes = self.inner.queue_pop("queue", block)
        return found

    def queue_len(self, key: str) -> int:
        return int(self.inner.queue_len("queue"))

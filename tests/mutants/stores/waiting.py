"""Mutants of conformance/spec/stores/waiting.py."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from tests.mutants.kit import breaks
from tests.mutants.stores.kit import StoreMutant


@breaks("store/set-timeout", says="timeout")
class KeepsItsFirstTimeout(StoreMutant):
    def set_timeout(self, timeout: timedelta) -> None:
        pass


@breaks("store/get-timeout", says="nothing was raised")
@breaks("store/woken-by-set", says="value")
@breaks("store/woken-by-compare-set", says="value")
@breaks("store/woken-by-append", says="value")
class GetsNothingAtOnce(StoreMutant):
    def get(self, key: str) -> bytes:
        found: bytes = self.inner.get(key) if self.inner.check([key]) else b""
        return found


@breaks("store/get-timeout", says="get: ended after 0.0")
class GivesUpAtOnce(StoreMutant):
    def get(self, key: str) -> bytes:
        if not self.inner.check([key]):
            raise dist.DistStoreError("timeout")
        found: bytes = self.inner.get(key)
        return found


@breaks("store/wait-timeout", says="nothing was raised")
class WaitsForTheFirstKeyAlone(StoreMutant):
    def wait(self, keys: list[str], *timeout: timedelta) -> None:
        self.inner.wait(keys[:1], *timeout)


@breaks("store/own-timeout", says="timeout of the store")
class KeepsTheTimeoutOfAWait(StoreMutant):
    def wait(self, keys: list[str], *timeout: timedelta) -> None:
        if timeout:
            self.inner.set_timeout(*timeout)
        self.inner.wait(keys)


@breaks("store/multi-get-timeout", says="nothing was raised")
@breaks("store/woken-by-multi-set", says="values")
class GetsSomeNothingAtOnce(StoreMutant):
    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.inner.get(key) if self.inner.check([key]) else b"" for key in keys]


@breaks("store/queue-timeout", says="nothing was raised")
@breaks("store/woken-by-push", says="values")
class PopsNothingAtOnce(StoreMutant):
    def queue_pop(self, key: str, block: bool = True) -> bytes:
        found: bytes = self.inner.queue_pop(key, block) if self.inner.queue_len(key) else b""
        return found


@breaks("store/timeout-error", says="TimeoutError was raised, not DistStoreError")
class RaisesTimeoutErrors(StoreMutant):
    def get(self, key: str) -> bytes:
        try:
            found: bytes = self.inner.get(key)
        except dist.DistStoreError as error:
            raise TimeoutError(str(error)) from error
        return found


@breaks("store/timeout-names-the-key", says="get says 'timeout'")
class NamesNoKey(StoreMutant):
    names_keys = True

    def get(self, key: str) -> bytes:
        try:
            found: bytes = self.inner.get(key)
        except dist.DistStoreError:
            raise dist.DistStoreError("timeout") from None
        return found


@breaks("store/timeout-names-no-other-key", says="it names a key that is there")
class NamesAllKeys(StoreMutant):
    def wait(self, keys: list[str], *timeout: timedelta) -> None:
        try:
            self.inner.wait(keys, *timeout)
        except dist.DistStoreError:
            raise dist.DistStoreError(f"timeout: {keys}") from None


@breaks("store/after-a-timeout", says="afterwards the store is of no use")
class IsClosedByATimeout(StoreMutant):
    is_closed = False

    def wait(self, keys: list[str], *timeout: timedelta) -> None:
        try:
            self.inner.wait(keys, *timeout)
        except dist.DistStoreError:
            self.is_closed = True
            raise

    def set(self, key: str, value: Any) -> None:
        if self.is_closed:
            raise dist.DistNetworkError("closed")
        self.inner.set(key, value)


@breaks("store/wait-for-what-is-there", says="it took")
class WaitsForOneKeyAtLeast(StoreMutant):
    def wait(self, keys: list[str], *timeout: timedelta) -> None:
        if not keys:
            time.sleep(12)
        self.inner.wait(keys, *timeout)


@breaks("store/woken-by-add", says="value")
@breaks("store/woken-by-all", says="all are there")
class DoesNotWait(StoreMutant):
    def wait(self, keys: list[str], *timeout: timedelta) -> None:
        pass


@breaks("store/wait-for-many", says="nothing was raised")
class WaitsForEightKeys(StoreMutant):
    def wait(self, keys: list[str], *timeout: Any) -> None:
        self.inner.wait(keys[:8], *timeout)

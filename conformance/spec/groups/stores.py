"""Stores on which cases make groups: file, TCP, prefix, and stores written in Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from conformance import Me


class CountersApart(dist.Store):
    """A store written in Python that keeps what `add` counts apart from what `set` stores.

    On such a store, `get` of a counter fails: code that mixes the two on one key fails. It has
    every method that torch looks for in Python, by the name by which torch looks for it.
    """

    timeout: timedelta

    def __init__(self, inner: dist.Store) -> None:
        super().__init__()
        # Any, as torch's annotations know only some of the methods.
        self._inner: Any = inner
        self._values: Any = dist.PrefixStore("values", inner)
        self._counters = dist.PrefixStore("counters", inner)
        self._clones: list[dist.Store] = []

    def set(self, key: str, value: str | bytes) -> None:
        self._values.set(key, value)

    def get(self, key: str) -> bytes:
        self._refuse_counter(key)
        self._values.wait([key], self.timeout)
        value: bytes = self._values.get(key)
        return value

    def add(self, key: str, amount: int) -> int:
        if self._values.check([key]):
            raise RuntimeError(f"{key!r} is a value, and was counted up")
        return self._counters.add(key, amount)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._values.wait(keys, timeout or self.timeout)

    def check(self, keys: list[str]) -> bool:
        return bool(self._values.check(keys))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        self._refuse_counter(key)
        held: bytes = self._values.compare_set(key, expected, desired)
        return held

    def append(self, key: str, value: str) -> None:
        self._refuse_counter(key)
        self._values.append(key, value)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def multi_set(self, keys: list[str], values: list[str]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def has_extended_api(self) -> bool:
        return bool(self._values.has_extended_api())

    def deleteKey(self, key: str) -> bool:  # noqa: N802  # torch's name
        deleted = [store.delete_key(key) for store in (self._values, self._counters)]
        return any(deleted)

    def getNumKeys(self) -> int:  # noqa: N802  # torch's name
        return int(self._inner.num_keys())

    def clone(self) -> dist.Store:
        # Held: torch loses what a Python store does with the object.
        self._clones.append(CountersApart(self._inner.clone()))
        return self._clones[-1]

    def _refuse_counter(self, key: str) -> None:
        if self._counters.check([key]):
            raise RuntimeError(f"{key!r} is a counter, and was used as a value")


class NobodyElseComes(dist.Store):
    """A store on which every wait is over at once, in vain: time need not pass in a test."""

    def __init__(self) -> None:
        super().__init__()
        self._inner = dist.HashStore()
        self.waits: list[Sequence[str]] = []

    def set(self, key: str, value: str) -> None:
        self._inner.set(key, value)

    def add(self, key: str, amount: int) -> int:
        return self._inner.add(key, amount)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self.waits.append(keys)
        raise RuntimeError("nobody has set these keys")


def file_store(me: Me, path: str) -> dist.Store:
    return dist.FileStore(path, me.world_size)


def tcp_store(me: Me, path: str) -> dist.Store:
    """Rank 0 is the server, on a port that the system chose; it is known by "port" in the world's.

    Without libuv, which leaves a pipe in the process for good, once it was used.
    """
    port = 0 if me.rank == 0 else int(me.store.get("port"))
    store = dist.TCPStore(
        me.host, port, is_master=me.rank == 0, wait_for_workers=False, use_libuv=False
    )
    if me.rank == 0:
        me.store.set("port", str(store.port))
    return store


def prefix_store(me: Me, path: str) -> dist.Store:
    return dist.PrefixStore("a", dist.PrefixStore("b/c", me.store))


def python_store(me: Me, path: str) -> dist.Store:
    return CountersApart(me.store)


STORES: dict[str, Callable[[Me, str], dist.Store]] = {
    "file": file_store,
    "tcp": tcp_store,
    "prefix": prefix_store,
    "python": python_store,
}

"""Rendezvous through a store: publish, wait until a deadline, name missing or failed ranks.

A rank waits here until one deadline, and is told whether the others did not come, one of them
failed, or the store itself did.

    store key     value                   set by
    failed        "rank <r>: <its error>" a rank that fails after it has come (`others_are_told`)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Protocol, TypeVar

from impl import errors
from impl.transport.base import Deadline

T = TypeVar("T")

LOOK_S = 1.0  # how often a rank that waits looks whether another one has failed

_STORE_CLOCK_S = 0.05  # stores count whole milliseconds, on a clock of their own
_FAILED_KEY = "failed"
_TOLD_MAX = 1000  # characters of another rank's error


class KeyValueStore(Protocol):
    """The part of `torch.distributed.Store` that is needed."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def wait(self, keys: list[str], timeout: timedelta) -> None: ...
    def check(self, keys: list[str]) -> bool: ...
    def delete_key(self, key: str) -> bool: ...


@contextmanager
def others_are_told(store: KeyValueStore, rank: int) -> Iterator[None]:
    """An error in the block is one of the other ranks as well, which meet this one on `store`.

    A timeout is none: the others see for themselves who has not come.
    """
    try:
        yield
    except errors.CollectiveTimeout:
        raise
    except BaseException as error:
        with suppress(Exception):
            if not store.check([_FAILED_KEY]):
                store.set(_FAILED_KEY, f"rank {rank}: {type(error).__name__}: {error}")
        raise


class StoreMeeting:
    """One rank's part in the meeting. Errors are `CommunicationError`s that name missing ranks."""

    operation = "rendezvous"

    def __init__(
        self, store: KeyValueStore, rank: int, world_size: int, group: str, until: Deadline
    ) -> None:
        self._store = store
        self.rank = rank
        self.world_size = world_size
        self.group = group
        self.until = until

    @property
    def where(self) -> str:
        return errors.describe_call(self.operation, -1, self.group)

    @property
    def others(self) -> list[int]:
        return [rank for rank in range(self.world_size) if rank != self.rank]

    def publish(self, key: str, value: str | bytes) -> None:
        with self._store_works():
            # torch's stores take bytes, though their annotations know only strings
            self._store.set(key, value)  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        with self._store_works():
            return self._store.get(key)

    def read(self, key: str, rank: int, decode: Callable[[bytes], T]) -> T:
        """What `rank` has put there. Raises CommunicationError if `decode` raises ValueError."""
        data = self.get(key)
        try:
            return decode(data)
        except ValueError as error:
            raise errors.CommunicationError(
                f"{self.where}, rank {self.rank} of {self.world_size}: what rank {rank} has"
                f" published as {key!r} is malformed: {error}"
            ) from error

    def are_there(self, keys: Sequence[str]) -> bool:
        with self._store_works():
            return self._store.check(list(keys))

    def forget(self, key: str) -> None:
        """Delete a key, so that a later attempt does not find it. Some stores cannot delete."""
        with suppress(RuntimeError):
            self._store.delete_key(key)

    def wait_for(self, keys: Sequence[str], missing: Callable[[], str]) -> None:
        """Wait until all keys are set. The error of a timeout ends with what `missing` returns."""
        while True:
            now_s = time.monotonic()
            look_at_s = min(max(self.until.at_s, now_s), now_s + LOOK_S)
            try:
                self._store.wait(list(keys), timedelta(seconds=look_at_s - now_s + _STORE_CLOCK_S))
                return
            except Exception as error:
                if time.monotonic() < look_at_s:
                    raise self._store_failed(error) from error
                if time.monotonic() >= self.until.at_s:
                    raise self.timed_out(missing()) from error
                self.check_others()

    def check_others(self) -> None:
        """Raises CommunicationError if another rank has failed."""
        if self.are_there([_FAILED_KEY]):
            told = self.get(_FAILED_KEY).decode(errors="replace")
            raise errors.CommunicationError(
                f"{self.where}, rank {self.rank} of {self.world_size}: another rank could not"
                f" join: {told[:_TOLD_MAX]}"
            )

    def absent(self, key_of: Callable[[int], str], ranks: Sequence[int]) -> list[int]:
        """Those of `ranks` whose keys are not there; all of them if that cannot be found out."""
        try:
            return [rank for rank in ranks if not self._store.check([key_of(rank)])]
        except Exception:
            return list(ranks)

    def timed_out(self, missing: str) -> errors.CollectiveTimeout:
        return errors.CollectiveTimeout(
            errors.timeout_message(
                self.where,
                self.operation,
                self.until.timeout_s,
                self.rank,
                self.world_size,
                missing,
            )
        )

    @contextmanager
    def _store_works(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            raise self._store_failed(error) from error

    def _store_failed(self, error: Exception) -> errors.CommunicationError:
        return errors.CommunicationError(
            f"{self.where}, rank {self.rank} of {self.world_size}: the store failed: {error}"
        )


def not_come(ranks: Sequence[int]) -> str:
    """`ranks 1, 3 have not come`."""
    return f"{errors.list_ranks(ranks)} {'has' if len(ranks) == 1 else 'have'} not come"

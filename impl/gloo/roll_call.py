"""How do the ranks of a group find a part of the store that is new to all of them?

Stores never forget: a group that is destroyed and made again on one store, or that failed to form
and is tried again, would read the addresses of the earlier attempt. Counting attempts does not
help, because a rank may have died or been replaced in between. So rank 0 calls the roll:

    store key       value                         set by
    here/<r>        a random token                every rank, at the beginning
    roll            an id, the tokens of all      rank 0, whenever it has seen a new token
    <id>/heard/<r>  ""                            a rank that finds its own token in the roll
    <id>/go         ""                            rank 0, once all ranks of this roll have answered

A token or a roll of an earlier attempt does no harm: nobody answers to it, and rank 0 calls again
when the token changes. When `<id>/go` is there, all ranks of this attempt have agreed on the id,
and the keys under it are theirs alone.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Protocol

from impl import errors
from impl.transport.base import Deadline

_PAUSE_S = (0.0002, 0.01)  # between looks at the store: from, doubling, up to
_STALE_AFTER_S = 0.03  # without all answers: look whether a token was one of an earlier attempt

_STORE_CLOCK_S = 0.05  # stores count whole milliseconds, on a clock of their own


class KeyValueStore(Protocol):
    """The part of `torch.distributed.Store` that a roll call needs."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def wait(self, keys: list[str], timeout: timedelta) -> None: ...
    def check(self, keys: list[str]) -> bool: ...
    def delete_key(self, key: str) -> bool: ...


class RollCall:
    """One rank's part in it."""

    def __init__(
        self, store: KeyValueStore, rank: int, world_size: int, group: str, until: Deadline
    ) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._group = group
        self._until = until
        self._token = secrets.token_hex(8)

    def agree(self) -> str:
        """A prefix for keys, new and the same on all ranks.

        Raises `CollectiveTimeout`, naming the ranks that have not come.
        """
        self._store.set(f"here/{self._rank}", self._token)
        return self._call() if self._rank == 0 else self._answer()

    def _call(self) -> str:
        """Rank 0: call until everybody who is here has answered."""
        keys = [f"here/{rank}" for rank in range(self._world_size)]
        while True:
            self._until_there(keys)
            tokens = [self._store.get(key).decode() for key in keys]
            roll = secrets.token_hex(8)
            self._store.set("roll", json.dumps([roll, tokens]))
            answers = [f"{roll}/heard/{rank}" for rank in range(1, self._world_size)]
            if self._all_answer(answers, keys, tokens):
                self._store.set(f"{roll}/go", "")
                for key in keys:
                    # spares the next attempt the detour over old tokens; some stores cannot forget
                    with suppress(RuntimeError, NotImplementedError):
                        self._store.delete_key(key)
                return roll

    def _all_answer(self, answers: list[str], keys: list[str], tokens: list[str]) -> bool:
        """False when another token has appeared, so that the roll must be called again."""
        stale_at_s = time.monotonic() + _STALE_AFTER_S
        for _ in self._looks():
            if not answers or self._store.check(answers):
                return True
            if time.monotonic() >= stale_at_s:
                if any(
                    self._store.get(key).decode() != token
                    for key, token in zip(keys, tokens, strict=True)
                ):
                    return False
                stale_at_s = time.monotonic() + _STALE_AFTER_S
        silent = [rank for rank, key in enumerate(answers, start=1) if not self._store.check([key])]
        raise self._timeout(silent)

    def _answer(self) -> str:
        """Any other rank: answer to every roll that has the own token, until one is complete."""
        self._until_there(["roll"])
        answered = ""
        for _ in self._looks():
            if not answered and not self._is_here(self._rank):
                # rank 0, tidying up after an earlier attempt, took it for that attempt's
                self._store.set(f"here/{self._rank}", self._token)
            roll, tokens = json.loads(self._store.get("roll").decode())
            if roll != answered and self._rank < len(tokens) and tokens[self._rank] == self._token:
                self._store.set(f"{roll}/heard/{self._rank}", "")
                answered = roll
            if answered and self._store.check([f"{answered}/go"]):
                return answered
        raise self._timeout([])

    def _looks(self) -> Iterator[None]:
        """Ever longer pauses, until the deadline."""
        pause_s, longest_s = _PAUSE_S
        while time.monotonic() < self._until.at_s:
            yield
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, longest_s)

    def _until_there(self, keys: list[str]) -> None:
        remaining_s = max(self._until.at_s - time.monotonic(), 0.001)
        try:
            self._store.wait(keys, timedelta(seconds=remaining_s))
        except RuntimeError as error:
            if time.monotonic() < self._until.at_s - _STORE_CLOCK_S:
                raise  # the store itself failed
            raise self._timeout([]) from error

    def _timeout(self, silent: list[int]) -> errors.CollectiveTimeout:
        """silent: ranks that came, but to an earlier attempt."""
        missing = silent or [
            rank
            for rank in range(self._world_size)
            if rank != self._rank and not self._is_here(rank)
        ]
        verb = "has" if len(missing) == 1 else "have"
        told = f"{errors.list_ranks(missing)} {verb} not come" if missing else "rank 0 gave up"
        return errors.CollectiveTimeout(
            errors.timeout_message(
                errors.describe_call("rendezvous", -1, self._group),
                "rendezvous",
                self._until.timeout_s,
                self._rank,
                self._world_size,
                told,
            )
        )

    def _is_here(self, rank: int) -> bool:
        with suppress(RuntimeError):
            return self._store.check([f"here/{rank}"])
        return False

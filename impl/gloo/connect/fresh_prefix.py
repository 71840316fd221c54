"""All ranks agree on a store-key prefix never used before: tokens, and rank 0 calls the roll.

Stores never forget: a group that is destroyed and made again on one store, or that failed to form
and is tried again, would read the addresses of the earlier attempt. Counting attempts does not
help, because a rank may have died or been replaced in between. So rank 0 calls the roll:

    store key       value                         set by
    here/<r>        a random token                every rank, at the beginning
    roll            an id, the tokens of all      rank 0, whenever it has seen a new token
    <id>/heard/<r>  ""                            a rank that finds its own token in the roll
    <id>/go         ""                            rank 0, once all ranks of this roll have answered

A token or a roll of an earlier attempt does no harm: no rank answers to it, and rank 0 calls again
when the token changes. When `<id>/go` is there, all ranks of this attempt have agreed on the id,
and the keys under it are theirs alone.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator

from impl.transport.base import Deadline
from impl.transport.meeting.store import KeyValueStore, StoreMeeting, not_come

_PAUSE_S = (0.0002, 0.01)  # between looks at the store: from, doubling, up to
_STALE_AFTER_S = 0.03  # without all answers: look whether a token was one of an earlier attempt


class PrefixMeeting(StoreMeeting):
    """One rank's part in the agreement on a prefix."""

    def __init__(
        self, store: KeyValueStore, rank: int, world_size: int, group: str, until: Deadline
    ) -> None:
        super().__init__(store, rank, world_size, group, until)
        self._token = secrets.token_hex(8)
        self._roll_before = b""  # the roll that was there when this rank came

    def agree(self) -> str:
        """A prefix for keys, new and the same on all ranks.

        Raises `CollectiveTimeout`, naming the ranks that have not come.
        """
        if self.rank == 0:
            self.publish(_here(0), self._token)
            return self._call()
        self._roll_before = self._roll()
        self.publish(_here(self.rank), self._token)
        return self._answer()

    def _call(self) -> str:
        """Rank 0: call until every rank that is here has answered."""
        keys = [_here(rank) for rank in range(self.world_size)]
        while True:
            self.wait_for(keys, self._missing)
            tokens = [self.read(key, rank, bytes.decode) for rank, key in enumerate(keys)]
            roll = secrets.token_hex(8)
            self.publish("roll", json.dumps([roll, tokens]))
            answers = [f"{roll}/heard/{rank}" for rank in range(1, self.world_size)]
            if self._all_answer(answers, keys, tokens):
                self.publish(f"{roll}/go", "")
                for key in keys:
                    self.forget(key)  # spares the next attempt the detour over old tokens
                return roll

    def _all_answer(self, answers: list[str], keys: list[str], tokens: list[str]) -> bool:
        """False when another token has appeared, so that the roll must be called again."""
        stale_at_s = time.monotonic() + _STALE_AFTER_S
        for _ in self._looks():
            if not answers or self.are_there(answers):
                return True
            if time.monotonic() >= stale_at_s:
                if any(
                    self.get(key) != token.encode() for key, token in zip(keys, tokens, strict=True)
                ):
                    return False
                stale_at_s = time.monotonic() + _STALE_AFTER_S
        # they came, but to an earlier attempt
        silent = [rank for rank, key in enumerate(answers, 1) if not self.are_there([key])]
        raise self.timed_out(not_come(silent) if silent else self._missing())

    def _answer(self) -> str:
        """Any other rank: answer to every roll that has its own token, until one is complete."""
        self.wait_for(["roll"], self._missing)
        answered = ""
        for _ in self._looks():
            if not answered and not self.are_there([_here(self.rank)]):
                # rank 0, tidying up after an earlier attempt, took it for that attempt's
                self.publish(_here(self.rank), self._token)
            roll, tokens = self.read("roll", 0, decode_roll)
            if roll != answered and self.rank < len(tokens) and tokens[self.rank] == self._token:
                self.publish(f"{roll}/heard/{self.rank}", "")
                answered = roll
            if answered and self.are_there([f"{answered}/go"]):
                return answered
        raise self.timed_out(self._missing())

    def _looks(self) -> Iterator[None]:
        """Ever longer pauses, until the deadline."""
        pause_s, longest_s = _PAUSE_S
        while time.monotonic() < self.until.at_s:
            yield
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, longest_s)

    def _missing(self) -> str:
        if self._formed_without():
            return f"the group formed with another process as rank {self.rank}"
        absent = self.absent(_here, self.others)
        return not_come(absent) if absent else "rank 0 gave up"

    def _formed_without(self) -> bool:
        """Whether a roll was complete, since this rank came, with another process in its place."""
        if self.rank == 0 or self._roll() in (b"", self._roll_before):
            return False
        roll, tokens = self.read("roll", 0, decode_roll)
        is_own = self.rank < len(tokens) and tokens[self.rank] == self._token
        return not is_own and self.are_there([f"{roll}/go"])

    def _roll(self) -> bytes:
        return self.get("roll") if self.are_there(["roll"]) else b""


def decode_roll(data: bytes) -> tuple[str, list[str]]:
    """A roll and its tokens. Raises ValueError."""
    try:
        found = json.loads(data)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    match found:
        case [str() as roll, [*tokens]]:
            return roll, tokens
    raise ValueError("no roll with its tokens")


def _here(rank: int) -> str:
    return f"here/{rank}"
